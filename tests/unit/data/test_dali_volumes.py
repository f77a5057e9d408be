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
    got, raw = batches(recipe), stacked(recipe)
    expected = (raw - raw.mean((1, 2, 3), keepdims=True)) / raw.std((1, 2, 3), keepdims=True)
    # Sums of 1200 float32 values in another order: a few units in the last place of values up to 4.
    np.testing.assert_allclose(torch.cat([v for v, _ in got])[:, 0].numpy(), expected, atol=1e-5)
    labels = torch.cat([label for _, label in got])
    assert labels.dtype == torch.int64
    assert labels.tolist() == [n % 3 for n in range(10)]
    cropped = batches(VolumeFiles(volumes, train=False, crop=(8, 6, 4), normalize=(100.0, 50.0), dtype="float16"))
    assert cropped[0][0].dtype == torch.float16
    expected = (raw[:, 2:10, 2:8, 3:7] - 100) / 50
    np.testing.assert_allclose(torch.cat([v for v, _ in cropped])[:, 0].numpy(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("flips", [True, False])
def test_all_eight_flips_occur_and_nothing_else(volumes, flips):
    recipe = VolumeFiles(volumes, train=True, normalize=None, flips=flips, index=True)
    allowed = [[axis for axis in range(3) if flip >> axis & 1] for flip in range(8 if flips else 1)]
    raw, seen = stacked(recipe), set()
    for got, _, numbers in batches(recipe, epochs=6):
        for volume, n in zip(got[:, 0].numpy(), numbers.tolist(), strict=True):
            match = [flip for flip, axes in enumerate(allowed) if np.array_equal(volume, np.flip(raw[n], axes))]
            assert match
            seen.update(match)
    assert seen == set(range(len(allowed)))


def test_a_random_crop_lies_within_and_wanders(volumes):
    recipe = VolumeFiles(volumes, train=True, crop=(5, 4, 4), normalize=None, flips=False, index=True)
    raw, corners = stacked(recipe), set()
    for got, _, numbers in batches(recipe, epochs=4):
        for volume, n in zip(got[:, 0].numpy(), numbers.tolist(), strict=True):
            places = itertools.product(range(8), range(7), range(7))
            found = [(z, y, x) for z, y, x in places if np.array_equal(volume, raw[n][z : z + 5, y : y + 4, x : x + 4])]
            assert found
            corners.update(found)
    assert all(len({corner[axis] for corner in corners}) > 4 for axis in range(3))


def test_channels_come_first(tmp_path):
    volume, path = np.arange(2 * 3 * 4 * 4, dtype=np.int16).reshape(2, 3, 4, 4), tmp_path / "left lung.npy"
    np.save(path, volume)
    ((got, labels),) = batches(VolumeFiles([(path, -5)], train=False, normalize=None))
    assert np.array_equal(got[0].numpy(), volume)
    assert labels.tolist() == [-5]
    np.save(path, np.full((3, 4, 4), 7.0, dtype=np.float32))
    ((got, _),) = batches(VolumeFiles([(path, 0)], train=False))
    assert (got == 0).all(), "a constant volume gives no NaN"


def test_unequal_shapes_are_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4, 4), dtype=np.float32))
    np.save(tmp_path / "b.npy", np.zeros((4, 4, 6), dtype=np.float32))
    np.save(tmp_path / "c.npy", np.zeros((1, 4, 4, 4), dtype=np.float32))
    pairs = [(tmp_path / f"{name}.npy", 0) for name in "abc"]
    with pytest.raises(ValueError, match=r"one shape, got \(4, 4, 4\) of '.*a.npy' and \(4, 4, 6\) of '.*b.npy'"):
        VolumeFiles(pairs[:2], train=False)
    assert batches(VolumeFiles(pairs[:2], train=False, crop=(4, 4, 4)))[0][0].shape == (2, 1, 4, 4, 4)
    with pytest.raises(ValueError, match=r"at most the shape \(4, 4, 4\) of '.*a.npy', got \(4, 4, 6\)"):
        VolumeFiles(pairs[:2], train=False, crop=(4, 4, 6))
    with pytest.raises(ValueError, match="the number of channels has to be equal"):
        VolumeFiles(pairs, train=False, crop=(4, 4, 4))


def write(version=None, cut=None, array=None):
    def writer(path):
        with open(path, "wb") as stream:
            np.lib.format.write_array(stream, np.zeros((2, 2, 2)) if array is None else array, version=version)
        path.write_bytes(path.read_bytes()[:cut])

    return writer


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (lambda path: path.write_bytes(b"no volume"), "Cannot read '.*b.npy' as a .npy file"),
        (write(cut=-3), "Cannot read '.*b.npy' as a .npy file: .*Repair the file"),
        (write(array=np.zeros(3)), r"b.npy': expected integers or floats .* got 'float64 of shape \(3,\)"),
        (write(array=np.zeros((2, 2, 2), dtype=complex)), "b.npy': expected .* got 'complex128"),
        (write(version=(2, 0)), r"b.npy': expected .* got '.*\(2, 0\)'"),
        (write(array=np.asfortranarray(np.zeros((2, 3, 4)))), "b.npy': expected .* got '.*Fortran order"),
        (lambda path: None, "No such file .*b.npy"),
    ],
)
def test_a_file_that_is_no_volume_is_named(tmp_path, writer, message):
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2)))
    writer(tmp_path / "b.npy")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        VolumeFiles([(tmp_path / "a.npy", 0), (tmp_path / "b.npy", 1)], train=False)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"source": []}, ValueError, "source: expected at least one pair of a path and an integer label"),
        ({"source": [("a.npy", 63.7)]}, TypeError, "float"),
        ({"flips": 1}, TypeError, "flips=1"),
        ({"normalize": "all"}, ValueError, "normalize: expected 'volume'"),
        ({"normalize": (math.nan, 1.0)}, ValueError, "normalize: expected 'volume'"),
        ({"normalize": (0.0, 0.0)}, ValueError, "with std above 0"),
        ({"crop": (4, 4)}, ValueError, r"crop: expected \(depth, height, width\)"),
        ({"crop": (4, 4, 0)}, ValueError, r"crop: expected \(depth, height, width\)"),
        ({"dtype": torch.uint8}, ValueError, "dtype: expected one of torch.float32, torch.float16"),
    ],
)
def test_wrong_arguments_are_refused(volumes, wrong, error, message):
    with pytest.raises(error, match=message):
        VolumeFiles(**{"source": volumes, "train": True, **wrong})
