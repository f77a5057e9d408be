"""VolumeFiles: real volumes against numpy, augmentation that is only what it says, and what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali")

from lightning_turbo.data.dali import DALILoader, VolumeFiles
from tests.dali_samples import make_volumes


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    return make_volumes(tmp_path_factory.mktemp("volumes"))  # 10 of shape (12, 10, 10)


def batches(recipe, batch_size=4, epochs=1, **kwargs):
    loader = DALILoader(recipe, batch_size, **{"num_threads": 1, "seed": 3, **kwargs})
    result = [batch for _ in range(epochs) for batch in loader]
    loader.close()
    return result


def stacked(recipe):
    return np.stack([np.load(file) for file in recipe.files])


def test_evaluation_equals_numpy(volumes):
    recipe = VolumeFiles(volumes, train=False)
    got = batches(recipe)
    raw = stacked(recipe)
    expected = (raw - raw.mean((1, 2, 3), keepdims=True)) / raw.std((1, 2, 3), keepdims=True)
    # Sums of 1200 float32 values in another order: a few units in the last place of values up to 4.
    np.testing.assert_allclose(torch.cat([v for v, _ in got])[:, 0].numpy(), expected, atol=1e-5)
    labels = torch.cat([label for _, label in got])
    assert labels.dtype == torch.int64
    assert labels.tolist() == [n % 3 for n in range(10)]


def test_centre_crop_and_fixed_normalisation(volumes):
    recipe = VolumeFiles(volumes, train=False, crop=(8, 6, 4), normalize=(100.0, 50.0))
    expected = (stacked(recipe)[:, 2:10, 2:8, 3:7] - 100) / 50
    np.testing.assert_allclose(torch.cat([v for v, _ in batches(recipe)])[:, 0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("flips", "turns"), [(True, False), (False, True), (True, True), (False, False)])
def test_flips_and_turns_are_just_that(volumes, flips, turns):
    """Every volume is one of the turned and flipped ones that may come, and in time all of them come."""
    recipe = VolumeFiles(
        volumes, train=True, normalize=None, intensity=0, flips=flips, turns=turns, index=True
    )  # fmt: skip
    raw = stacked(recipe)
    allowed = list(
        itertools.product(range(4) if turns else [0], itertools.product((0, 1), repeat=3) if flips else [()])
    )
    images = [
        [np.flip(np.rot90(volume, turn, axes=(1, 2)), [a for a, f in enumerate(flip) if f]) for turn, flip in allowed]
        for volume in raw
    ]
    seen = set()
    for got, _, numbers in batches(recipe, epochs=6):
        for volume, n in zip(got[:, 0].numpy(), numbers.tolist(), strict=True):
            match = [place for place, image in enumerate(images[n]) if np.array_equal(volume, image)]
            assert match, (n, flips, turns)
            seen.update(match)
    distinct = {1: 1, 4: 4, 8: 8, 32: 16}[len(allowed)]  # two flips in the plane equal half a turn
    assert len(seen) >= distinct


def test_a_random_crop_lies_within_and_wanders(volumes):
    recipe = VolumeFiles(
        volumes, train=True, crop=(5, 4, 4), normalize=None, intensity=0, flips=False, turns=False, index=True
    )  # fmt: skip
    raw, corners = stacked(recipe), set()
    for got, _, numbers in batches(recipe, epochs=4):
        for volume, n in zip(got[:, 0].numpy(), numbers.tolist(), strict=True):
            places = itertools.product(range(8), range(7), range(7))
            found = [
                c
                for c in places
                if np.array_equal(volume, raw[n][tuple(slice(a, a + s) for a, s in zip(c, (5, 4, 4), strict=True))])
            ]
            assert found
            corners.update(found)
    assert all(len({corner[axis] for corner in corners}) > 4 for axis in range(3))


def test_intensity_is_a_gain_and_an_offset(volumes):
    recipe = VolumeFiles(volumes, train=True, flips=False, turns=False, intensity=0.2, index=True, shuffle=False)
    plain = torch.cat([v for v, _ in batches(VolumeFiles(volumes, train=False))])
    got = torch.cat([v for v, _, _ in batches(recipe)])
    for volume, reference in zip(got, plain, strict=True):
        gain, offset = np.polyfit(reference.flatten().double().numpy(), volume.flatten().double().numpy(), 1)
        assert 0.8 <= gain <= 1.2
        assert -0.2 <= offset <= 0.2
        torch.testing.assert_close(
            volume, reference * float(gain) + float(offset), atol=1e-5, rtol=0
        )  # float32 rounding
    assert not torch.equal(got, plain)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layout_and_dtype(volumes, channels_last, dtype):
    got, labels = batches(VolumeFiles(volumes, train=True, dtype=dtype, channels_last=channels_last))[0]
    assert got.shape == (4, 1, 12, 10, 10)
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format)
    assert labels.shape == (4,)


def test_channels_come_first(tmp_path):
    volume = np.arange(2 * 3 * 4 * 4, dtype=np.int16).reshape(2, 3, 4, 4)
    np.save(tmp_path / "left lung.npy", volume)
    (tmp_path / "list.txt").write_text("left lung.npy -5\n\n")
    for channels_last in (False, True):
        recipe = VolumeFiles(tmp_path / "list.txt", train=False, normalize=None, channels_last=channels_last)
        ((got, labels),) = batches(recipe)
        assert np.array_equal(got[0].numpy(), volume)
        assert labels.tolist() == [-5]
    np.save(tmp_path / "left lung.npy", np.full((3, 4, 4), 7.0, dtype=np.float32))
    ((got, _),) = batches(VolumeFiles(tmp_path / "list.txt", train=False))
    assert (got == 0).all(), "a constant volume gives no NaN"


def test_unequal_shapes_are_named(volumes, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4, 4), dtype=np.float32))
    np.save(tmp_path / "b.npy", np.zeros((4, 4, 6), dtype=np.float32))
    pairs = [(tmp_path / "a.npy", 0), (tmp_path / "b.npy", 1)]
    with pytest.raises(ValueError, match=r"b.npy' has the shape \(4, 4, 6\), but '.*a.npy' has \(4, 4, 4\)"):
        VolumeFiles(pairs, train=False)
    assert batches(VolumeFiles(pairs, train=False, crop=(4, 4, 4)))[0][0].shape == (2, 1, 4, 4, 4)
    with pytest.raises(ValueError, match=r"a.npy' has the shape \(4, 4, 4\), smaller than crop=\(4, 4, 6\)"):
        VolumeFiles(pairs, train=False, crop=(4, 4, 6))


def write(version=None, cut=None, array=None):
    def writer(path):
        with open(path, "wb") as stream:
            np.lib.format.write_array(stream, np.zeros((2, 2, 2)) if array is None else array, version=version)
        path.write_bytes(path.read_bytes()[:cut])

    return writer


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (lambda path: path.write_bytes(b"no volume"), "is not a .npy file that can be read"),
        (lambda path: path.write_bytes(b""), "is not a .npy file that can be read"),
        (write(cut=-3), "is not a .npy file that can be read: .*Repair the file"),
        (write(array=np.zeros(3)), r"holds float64 of shape \(3,\): expected integers or floats"),
        (write(array=np.zeros((2, 2, 2), dtype=complex)), "holds complex128"),
        (write(version=(2, 0)), r"is stored in Fortran order or format \(2, 0\).*Save it again with np.save"),
        (write(array=np.asfortranarray(np.zeros((2, 3, 4)))), "is stored in Fortran order or format"),
        (lambda path: None, "does not exist"),
    ],
)
def test_a_file_that_is_no_volume_is_named(tmp_path, writer, message):
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2)))
    writer(tmp_path / "b.npy")
    with pytest.raises((ValueError, FileNotFoundError), match=rf"b.npy' {message}"):
        VolumeFiles([("a.npy", 0), ("b.npy", 1)], root=tmp_path, train=False)


def test_a_volume_that_changes_under_way_is_named(tmp_path):
    for n in range(4):
        np.save(tmp_path / f"{n}.npy", np.zeros((4, 4, 4), dtype=np.float32))
    recipe = VolumeFiles([(f"{n}.npy", n) for n in range(4)], train=False, root=tmp_path)
    (tmp_path / "2.npy").write_bytes((tmp_path / "2.npy").read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"2.npy' could not be made a sample"):
        batches(recipe)


@pytest.mark.parametrize("label", [63.7, float("nan")])
def test_labels_are_not_cut_off_to_integers(tmp_path, label):
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2), dtype=np.float32))
    with pytest.raises(ValueError, match=r"labels that are not whole|convert float NaN"):
        VolumeFiles([(tmp_path / "a.npy", label)], train=True)
    for accepted in (3, 3.0, np.int16(3), "3", torch.tensor(3)):
        assert VolumeFiles([(tmp_path / "a.npy", accepted)], train=True).labels.tolist() == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.npy 1\nb.npy\n", r"list.txt, line 2: 'b.npy' is not 'path label'"),
        ("a.npy one\n", r"line 1: 'a.npy one' is not 'path label' with an integer label"),
        ("\n", "lists no volume"),
        (None, "is not a file"),
    ],
)
def test_a_list_that_cannot_be_read_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "list.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        VolumeFiles(path, train=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"intensity": 1.0}, "intensity=1.0: expected a number from 0 to below 1"),
        ({"intensity": -0.1}, "expected a number from 0 to below 1"),
        ({"intensity": math.nan}, "intensity=nan: expected a number from 0 to below 1"),
        ({"normalize": 3}, "normalize=3: expected 'volume'"),
        ({"normalize": (math.nan, 1.0)}, "expected 'volume'"),
        ({"crop": 4}, "crop=4: expected depth, height and width"),
        ({"normalize": "all"}, "expected 'volume'"),
        ({"normalize": (0.0, 0.0)}, "with std above 0"),
        ({"crop": (4, 4)}, "expected depth, height and width"),
        ({"crop": (4, 4, 0)}, "each at least 1"),
        ({"crop": (4, 4, 6)}, "turns=True needs planes as high as wide, but they are 4 x 6"),
        ({"dtype": torch.uint8}, "dtype=torch.uint8: expected one of torch.float32, torch.float16"),
    ],
)
def test_wrong_arguments_are_refused(volumes, wrong, message):
    with pytest.raises(ValueError, match=message):
        VolumeFiles(volumes, train=True, **wrong)
