"""VolumeFiles: real volumes against numpy, augmentation that is only what it says, and what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch

from lightning_turbo.data.dali import DALILoader, FileRecipe, VolumeFiles
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


def test_raw_values_come_through_untouched(volumes):
    recipe = VolumeFiles(volumes, train=False, normalize=None)
    assert np.array_equal(torch.cat([v for v, _ in batches(recipe)])[:, 0].numpy(), stacked(recipe))


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
    np.save(tmp_path / "a.npy", volume)
    for channels_last in (False, True):
        recipe = VolumeFiles([("a.npy", 5)], train=False, root=tmp_path, normalize=None, channels_last=channels_last)
        ((got, labels),) = batches(recipe)
        assert np.array_equal(got[0].numpy(), volume)
        assert labels.tolist() == [5]


def test_fortran_order_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.asfortranarray(np.zeros((3, 4, 5), dtype=np.float32)))
    with pytest.raises(ValueError, match=r"a.npy' is stored in Fortran order.*Save it again with np.save"):
        VolumeFiles([(tmp_path / "a.npy", 0)], train=False)


def test_a_constant_volume_gives_no_nan(tmp_path):
    np.save(tmp_path / "a.npy", np.full((3, 4, 4), 7.0, dtype=np.float32))
    ((got, _),) = batches(VolumeFiles([(tmp_path / "a.npy", 0)], train=False))
    assert (got == 0).all()


def test_paths_with_spaces(tmp_path):
    np.save(tmp_path / "left lung.npy", np.zeros((2, 2, 2), dtype=np.float32))
    (tmp_path / "list.txt").write_text("left lung.npy -1\n\n")
    recipe = VolumeFiles(tmp_path / "list.txt", train=False)
    assert recipe.labels.tolist() == [-1]
    assert recipe.files[0].endswith("left lung.npy")


def test_unequal_shapes_are_named(volumes, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4, 4), dtype=np.float32))
    np.save(tmp_path / "b.npy", np.zeros((4, 4, 6), dtype=np.float32))
    pairs = [(tmp_path / "a.npy", 0), (tmp_path / "b.npy", 1)]
    with pytest.raises(ValueError, match=r"b.npy' has the shape \(4, 4, 6\), but '.*a.npy' has \(4, 4, 4\)"):
        VolumeFiles(pairs, train=False)
    assert batches(VolumeFiles(pairs, train=False, crop=(4, 4, 4)))[0][0].shape == (2, 1, 4, 4, 4)
    with pytest.raises(ValueError, match=r"a.npy' has the shape \(4, 4, 4\), smaller than crop=\(4, 4, 6\)"):
        VolumeFiles(pairs, train=False, crop=(4, 4, 6))


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"source='nowhere.txt' is no file"):
        VolumeFiles("nowhere.txt", train=True)
    with pytest.raises(FileNotFoundError, match=r"the volume '.*gone.npy' does not exist"):
        VolumeFiles([("gone.npy", 0)], train=True)
    (tmp_path / "a.npy").write_bytes(b"no volume at all")
    with pytest.raises(ValueError, match=r"a.npy' is no .npy file that can be read"):
        VolumeFiles([(tmp_path / "a.npy", 0)], train=True)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"b.npy' holds float64 of shape \(3,\): accepted are"):
        VolumeFiles([(tmp_path / "b.npy", 0)], train=True)
    np.save(tmp_path / "c.npy", np.zeros((2, 2, 2), dtype=complex))
    with pytest.raises(ValueError, match=r"c.npy' holds complex128"):
        VolumeFiles([(tmp_path / "c.npy", 0)], train=True)
    with open(tmp_path / "d.npy", "wb") as stream:
        np.lib.format.write_array(stream, np.zeros((2, 2, 2)), version=(2, 0))
    with pytest.raises(ValueError, match=r"d.npy' is no .npy file that can be read: its format is version \(2, 0\)"):
        VolumeFiles([(tmp_path / "d.npy", 0)], train=True)


@pytest.mark.parametrize("label", [63.7, float("nan")])
def test_labels_are_not_cut_off_to_integers(tmp_path, label):
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2), dtype=np.float32))
    with pytest.raises(ValueError, match=r"labels hold float64 numbers that are not whole: give integers"):
        VolumeFiles([(tmp_path / "a.npy", label)], train=True)
    for accepted in (3, 3.0, np.int16(3), "3", torch.tensor(3)):
        assert VolumeFiles([(tmp_path / "a.npy", accepted)], train=True).labels.tolist() == [3]


def test_labels_of_a_recipe_of_ones_own_may_be_digits():
    class Own(FileRecipe):
        def define(self, dali, encoded, device):
            return encoded

    assert Own(["a", "b"], ["3", "12"], shuffle=False, index=False).labels.tolist() == [3, 12]


def test_a_list_that_cannot_be_read_is_named_with_its_line(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("a.npy 1\nb.npy\n")
    with pytest.raises(ValueError, match=r"list.txt, line 2: 'b.npy' is not 'path label'"):
        VolumeFiles(path, train=True)
    path.write_text("a.npy one\n")
    with pytest.raises(ValueError, match=r"line 1: 'a.npy one' is not 'path label' with an integer label"):
        VolumeFiles(path, train=True)
    path.write_text("\n")
    with pytest.raises(ValueError, match="lists no volume"):
        VolumeFiles(path, train=True)


def test_a_volume_that_is_cut_short_is_named(volumes, tmp_path):
    for n in range(4):
        np.save(tmp_path / f"{n}.npy", np.zeros((4, 4, 4), dtype=np.float32))
    whole = (tmp_path / "2.npy").read_bytes()
    (tmp_path / "2.npy").write_bytes(whole[:-50])
    recipe = VolumeFiles([(f"{n}.npy", n) for n in range(4)], train=False, root=tmp_path)
    with pytest.raises(ValueError, match=r"2.npy' could not be made a sample"):
        batches(recipe)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"intensity": 1.0}, "intensity=1.0: give a number from 0 to below 1"),
        ({"intensity": -0.1}, "give a number from 0 to below 1"),
        ({"intensity": math.nan}, "intensity=nan: give a number from 0 to below 1"),
        ({"normalize": 3}, "normalize=3: accepted are 'volume'"),
        ({"normalize": (math.nan, 1.0)}, "accepted are 'volume'"),
        ({"crop": 4}, "crop=4: give depth, height and width"),
        ({"normalize": "all"}, "accepted are 'volume'"),
        ({"normalize": (0.0, 0.0)}, "with std above 0"),
        ({"crop": (4, 4)}, "give depth, height and width"),
        ({"crop": (4, 4, 0)}, "each at least 1"),
        ({"crop": (4, 4, 6)}, "turns=True needs planes as high as wide, but they are 4 x 6"),
        ({"dtype": torch.uint8}, "dtype=torch.uint8: accepted are torch.float32, torch.float16"),
    ],
)
def test_wrong_arguments_are_refused(volumes, wrong, message):
    with pytest.raises(ValueError, match=message):
        VolumeFiles(volumes, train=True, **wrong)


@pytest.mark.parametrize("switch", ["train", "flips", "turns", "channels_last", "shuffle", "index"])
def test_a_switch_is_a_bool(volumes, switch):
    with pytest.raises(TypeError, match=f"{switch}='no' is no bool; accepted are True and False"):
        VolumeFiles(volumes, **{"train": True, switch: "no"})
