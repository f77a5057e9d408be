"""ImageFolder: what it finds, what it makes of a file, and what it refuses."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("nvidia.dali")

from lightning_turbo.data.dali import DALILoader, ImageFolder
from lightning_turbo.data.dali.images import IMAGENET_MEAN, IMAGENET_STD
from tests.dali_samples import CLASSES, make_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


def batches(recipe, batch_size=4):
    loader = DALILoader(recipe, batch_size, num_threads=1, seed=3)
    result = list(loader)
    loader.close()
    return result


def reference(path, size, resize):
    """Shorter side to ``resize``, center crop of ``size``, values 0 to 255, by Pillow."""
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
    unlabeled = ImageFolder(photos, train=False, size=48, resize=56, labeled=False)
    assert torch.equal(batches(unlabeled)[0], batches(recipe)[0][0])  # a single output is the tensor itself
    got = torch.cat([images for images, _ in batches(recipe, 5)])
    mean, std = (np.array(v, dtype=np.float32) * 255 for v in (IMAGENET_MEAN, IMAGENET_STD))
    for image, file in zip(got, recipe.files, strict=True):
        pixels = image.permute(1, 2, 0).numpy() * std + mean
        difference = np.abs(pixels - reference(file, 48, 56))
        # Both decode to the same pixels. Pillow rounds to whole levels after each of its two passes, DALI once at the
        # end: one level of 255, and float32's rounding of the normalization.
        assert difference.max() < 1.01, file
        assert difference.mean() < 0.3, file


def test_windows_have_the_area_and_ratio_of_the_arguments(tmp_path):
    """On an image whose pixels are their own coordinates, the corners of a crop show its window."""
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
def test_layout_dtype_and_uint8_normalized_later(photos, train, channels_last, dtype):
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
    # The float pipeline normalizes the same rounded pixels; only the rounding of the operations differs.
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
    assert len(ImageFolder(tmp_path, train=False, labeled=False).files) == 1
    (tmp_path / ".thumbs").rename(tmp_path / "full")
    assert ImageFolder(tmp_path, train=True, classes=["hollow", "full"]).labels.tolist() == [1]


def test_after_a_file_that_cannot_be_decoded_the_loader_begins_again(tmp_path):
    recipe = ImageFolder(make_photos(tmp_path, per_class=4), train=False, size=32)
    bad = Path(recipe.files[6])
    good = bad.read_bytes()
    bad.write_bytes(b"no image")
    loader = DALILoader(recipe, 4, num_threads=1)
    with pytest.raises(RuntimeError, match=r"Error in CPU operator .nvidia.dali.fn.decoders.image"):
        list(loader)
    bad.write_bytes(good)
    assert torch.cat([labels for _, labels in loader]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    loader.close()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"train": "no"}, TypeError, "train='no'"),
        ({"shuffle": "no"}, TypeError, "shuffle='no'"),
        ({"classes": ["a", "a"]}, ValueError, "classes: expected at least one name, and each name once"),
        ({"size": 0}, ValueError, "size: expected an integer of at least 1, got 0"),
        ({"size": 64, "resize": 32}, ValueError, "resize: expected an integer of at least size=64, got 32"),
        ({"dtype": torch.bfloat16}, ValueError, "one of torch.float32, torch.float16, torch.uint8"),
        ({"mean": (0.5, 0.5, math.nan)}, ValueError, "mean: expected three numbers"),
        ({"std": (0.1, 0.0, 0.1)}, ValueError, "std: expected three numbers above 0"),
        ({"area": (0.5, 1.1)}, ValueError, "area: expected two rising numbers above 0, at most 1"),
        ({"ratio": (1, math.inf)}, ValueError, "ratio: expected two rising numbers above 0"),
    ],
)
def test_wrong_arguments_are_refused(photos, wrong, error, message):
    with pytest.raises(error, match=message):
        ImageFolder(**{"train": True, "root": photos, **wrong})


def test_files_that_are_no_images_any_more_are_named_and_others_not(tmp_path):
    recipe = ImageFolder(make_photos(tmp_path), train=False)
    assert recipe.name_broken() == ""
    paths = [Path(name) for name in recipe.files[:5]]
    for path in paths[:3]:
        path.unlink()
    for path in paths[3:]:
        path.write_bytes(b"an error page of a server")
    named = ", ".join(map(str, paths[:3]))
    assert recipe.name_broken() == f"These files are not JPEG or PNG: {named} and 2 more. Remove or repair them."
