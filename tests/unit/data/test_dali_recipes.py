"""ImageFolder and VolumeFiles: what they find, what they make of a file, and what they refuse."""

import io
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("nvidia.dali")

from lightning_turbo.data.dali import DALILoader, ImageFolder, VolumeFiles
from lightning_turbo.data.dali.images import IMAGENET_MEAN, IMAGENET_STD
from tests.dali_samples import CLASSES, make_photos, make_volumes


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    return make_volumes(tmp_path_factory.mktemp("volumes"))  # 10 of shape (12, 10, 10)


def batches(recipe, batch_size=4, epochs=1):
    loader = DALILoader(recipe, batch_size, num_threads=1, seed=3)
    result = [batch for _ in range(epochs) for batch in loader]
    loader.close()
    return result


# Images.


def reference(path, size, resize):
    """Shorter side to ``resize``, centre crop of ``size``, values 0 to 255, by Pillow."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    scale = resize / min(width, height)
    image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    width, height = image.size
    left, top = (width - size) / 2, (height - size) / 2
    left, top = int(left + 0.5), int(top + 0.5)
    return np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.float32)


def test_evaluation_equals_pillow(photos):
    recipe = ImageFolder(photos, train=False, size=48, resize=56)
    assert recipe.classes == CLASSES
    assert recipe.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    unlabelled = ImageFolder(photos, train=False, size=48, resize=56, labelled=False)
    assert torch.equal(batches(unlabelled)[0], batches(recipe)[0][0])  # a single output is the tensor itself
    got = torch.cat([images for images, _ in batches(recipe, 5)])
    mean, std = (np.array(v, dtype=np.float32) * 255 for v in (IMAGENET_MEAN, IMAGENET_STD))
    for image, file in zip(got, recipe.files, strict=True):
        pixels = image.permute(1, 2, 0).numpy() * std + mean
        difference = np.abs(pixels - reference(file, 48, 56))
        # Both decode to the same pixels. Pillow rounds to whole levels after each of its two passes, DALI once at the
        # end: one level of 255, and float32's rounding of the normalisation.
        assert difference.max() < 1.01, file
        assert difference.mean() < 0.3, file


def test_windows_have_the_area_and_ratio_of_the_arguments(tmp_path):
    """On an image whose pixels are their own coordinates, the corners of a crop tell its window."""
    folder = tmp_path / "one"
    folder.mkdir()
    y, x = np.mgrid[0:200, 0:250]
    Image.fromarray(np.stack([y, x, 0 * y], -1).astype(np.uint8)).save(folder / "grid.png")
    recipe = ImageFolder(tmp_path, train=True, size=100, area=(0.2, 0.5), ratio=(0.5, 2), dtype=torch.uint8)
    loader = DALILoader(recipe, 1, num_threads=1)
    mirrored = 0
    for _ in range(40):
        ((images, _),) = loader
        height = (int(images[0, 0, -1, 50]) - int(images[0, 0, 0, 50])) * 100 / 99
        width = (int(images[0, 1, 50, -1]) - int(images[0, 1, 50, 0])) * 100 / 99
        mirrored += width < 0
        assert 0.15 < height * abs(width) / (200 * 250) < 0.55
        assert 0.45 < abs(width) / height < 2.2
    assert 8 < mirrored < 32  # half of 40, within four standard deviations
    loader.close()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layout_dtype_and_uint8_normalised_later(photos, train, channels_last, dtype):
    settings = {"train": train, "size": 32, "channels_last": channels_last}
    images, labels = batches(ImageFolder(photos, dtype=dtype, **settings))[0]
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == ((4, 3, 32, 32), dtype, (4,), torch.int64)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    small = ImageFolder(photos, dtype="uint8", **settings)
    pixels, same = batches(small)[0]
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(labels, same)
    # The float pipeline normalises the same rounded pixels; only the rounding of the operations differs.
    atol = 2e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(small.normalizer(dtype)(pixels), images, atol=atol, rtol=0, check_stride=False)


def test_what_a_folder_may_hold(tmp_path):
    """What is refused of its classes is shown with ``pack_folder``, which finds them in the same way."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ImageFolder("nowhere", train=True)
    for name in ("a.png", ".hidden.png", ".thumbs/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    with pytest.raises(ValueError, match=r"expected a folder with images \(.jpg, .jpeg, .png\), in one subfolder"):
        ImageFolder(tmp_path, train=True)
    assert len(ImageFolder(tmp_path, train=False, labelled=False).files) == 1
    (tmp_path / ".thumbs").rename(tmp_path / "full")
    assert ImageFolder(tmp_path, train=True, classes=["hollow", "full"]).labels.tolist() == [1]


def encode(image, kind):
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


SPOILED = {
    "empty": lambda image: b"",
    "another format": lambda image: encode(image, "GIF"),
    "JPEG, half of it": lambda image: encode(image, "JPEG")[:700],
    "PNG, its pixels": lambda image: encode(image, "PNG")[:1000] + b"x" * 300 + encode(image, "PNG")[1300:],
    "gone": None,
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_file_that_cannot_be_decoded_is_named(tmp_path, spoil):
    photos = make_photos(tmp_path, per_class=4, suffixes=(".jpg",))
    recipe = ImageFolder(photos, train="JPEG" in spoil, size=32, shuffle=False)
    bad, good = Path(recipe.files[6]), Image.open(recipe.files[6])
    good.load()
    bad.unlink() if spoil == "gone" else bad.write_bytes(SPOILED[spoil](good))
    loader = DALILoader(recipe, 4, num_threads=1)
    with pytest.raises(ValueError, match=rf"Cannot decode '{bad}': .+ Repair the file or remove it"):
        list(loader)
    good.save(bad)
    assert torch.cat([labels for _, labels in loader]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    loader.close()


# Volumes.


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
    ("recipe", "wrong", "error", "message"),
    [
        (ImageFolder, {"train": "no"}, TypeError, "train='no'"),
        (ImageFolder, {"shuffle": "no"}, TypeError, "shuffle='no'"),
        (ImageFolder, {"classes": ["a", "a"]}, ValueError, "classes: expected at least one name, and each name once"),
        (ImageFolder, {"size": 0}, ValueError, "size: expected a whole number of at least 1, got 0"),
        (ImageFolder, {"size": 64, "resize": 32}, ValueError, "resize: expected a .* at least size=64, got 32"),
        (ImageFolder, {"dtype": torch.bfloat16}, ValueError, "one of torch.float32, torch.float16, torch.uint8"),
        (ImageFolder, {"mean": (0.5, 0.5, math.nan)}, ValueError, "mean: expected three numbers"),
        (ImageFolder, {"std": (0.1, 0.0, 0.1)}, ValueError, "std: expected three numbers above 0"),
        (ImageFolder, {"area": (0.5, 1.1)}, ValueError, "area: expected two rising numbers above 0, at most 1"),
        (ImageFolder, {"ratio": (1, math.inf)}, ValueError, "ratio: expected two rising numbers above 0"),
        (VolumeFiles, {"source": []}, ValueError, "source: expected at least one pair of a path and an integer label"),
        (VolumeFiles, {"source": [("a.npy", 63.7)]}, TypeError, "float"),
        (VolumeFiles, {"flips": 1}, TypeError, "flips=1"),
        (VolumeFiles, {"normalize": "all"}, ValueError, "normalize: expected 'volume'"),
        (VolumeFiles, {"normalize": (math.nan, 1.0)}, ValueError, "normalize: expected 'volume'"),
        (VolumeFiles, {"normalize": (0.0, 0.0)}, ValueError, "with std above 0"),
        (VolumeFiles, {"crop": (4, 4)}, ValueError, r"crop: expected \(depth, height, width\)"),
        (VolumeFiles, {"crop": (4, 4, 0)}, ValueError, r"crop: expected \(depth, height, width\)"),
        (VolumeFiles, {"dtype": torch.uint8}, ValueError, "dtype: expected one of torch.float32, torch.float16"),
    ],
)
def test_wrong_arguments_are_refused(photos, volumes, recipe, wrong, error, message):
    source = {"root": photos} if recipe is ImageFolder else {"source": volumes}
    with pytest.raises(error, match=message):
        recipe(**{"train": True, **source, **wrong})
