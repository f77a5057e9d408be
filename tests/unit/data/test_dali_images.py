"""ImageFolder: what it finds, what it makes of an image, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_turbo.data.dali import DALILoader, ImageFolder
from lightning_turbo.data.dali.images import IMAGENET_MEAN, IMAGENET_STD
from tests.dali_samples import CLASSES, make_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


def batches(recipe, batch_size=5, **kwargs):
    loader = DALILoader(recipe, batch_size, num_threads=1, **kwargs)
    result = list(loader)
    loader.close()
    return result


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


def test_classes_files_and_labels(photos):
    recipe = ImageFolder(photos, train=False)
    assert recipe.classes == CLASSES
    assert len(recipe.files) == 24
    assert recipe.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert all(f"/{CLASSES[label]}/" in file for file, label in zip(recipe.files, recipe.labels, strict=True))


def test_evaluation_equals_pillow(photos):
    recipe = ImageFolder(photos, train=False, size=48, resize=56)
    got = torch.cat([images for images, _ in batches(recipe)])
    mean, std = (np.array(v, dtype=np.float32) * 255 for v in (IMAGENET_MEAN, IMAGENET_STD))
    for image, file in zip(got, recipe.files, strict=True):
        pixels = image.permute(1, 2, 0).numpy() * std + mean
        difference = np.abs(pixels - reference(file, 48, 56))
        # Both decode to the same pixels. Pillow rounds to whole levels after each of its two passes, DALI once at the
        # end: one level of 255, and float32's rounding of the normalisation.
        assert difference.max() < 1.01, file
        assert difference.mean() < 0.3, file


def test_training_windows_differ_between_epochs_and_keep_their_image(photos):
    recipe = ImageFolder(photos, train=True, size=32, index=True)
    loader = DALILoader(recipe, 8, num_threads=1)
    first, second = (
        {int(n): image for images, _, numbers in loader for image, n in zip(images, numbers, strict=True)} for _ in "ab"
    )
    assert sorted(first) == sorted(second) == list(range(24))
    assert all(not torch.equal(first[n], second[n]) for n in first)
    loader.close()


def test_a_full_window_without_mirroring_is_the_whole_image(photos):
    square = ImageFolder(photos, train=True, size=40, area=(1, 1), ratio=(110 / 72, 110 / 72), mirror=False, index=True)
    images, _, numbers = batches(square, 24)[0]
    mean, std = (np.array(v, dtype=np.float32) * 255 for v in (IMAGENET_MEAN, IMAGENET_STD))
    for image, n in zip(images, numbers, strict=True):
        whole = Image.open(square.files[n]).convert("RGB")
        if whole.size != (110, 72):
            continue
        expected = np.asarray(whole.resize((40, 40), Image.Resampling.BILINEAR), dtype=np.float32)
        difference = np.abs(image.permute(1, 2, 0).numpy() * std + mean - expected)
        assert difference.mean() < 1.0  # rounding of pixels, and of the window to whole pixels


def test_windows_have_the_area_and_ratio_that_were_asked_for(tmp_path):
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
def test_layout_and_dtype(photos, train, channels_last, dtype):
    recipe = ImageFolder(photos, train=train, size=32, channels_last=channels_last, dtype=dtype)
    images, labels = batches(recipe)[0]
    assert images.shape == (5, 3, 32, 32)
    assert images.dtype == dtype
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    assert labels.shape == (5,)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("train", [False, True])
def test_uint8_normalised_later_equals_float(photos, train):
    whole = batches(ImageFolder(photos, train=train, size=32))
    small = ImageFolder(photos, train=train, size=32, dtype="uint8")
    for (images, labels), (pixels, same) in zip(whole, batches(small), strict=True):
        assert pixels.dtype == torch.uint8
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels, same)
        # The float pipeline normalises the same rounded pixels; only the order of float32 operations differs.
        torch.testing.assert_close(small.normalizer()(pixels), images, atol=2e-5, rtol=0)


def test_labels_of_a_batch_of_one_keep_their_dimension(photos):
    images, labels = batches(ImageFolder(photos, train=False, size=32), 1)[-1]
    assert images.shape == (1, 3, 32, 32)
    assert labels.shape == (1,)
    assert labels.dtype == torch.int64


def test_without_labels_a_batch_is_the_tensor(photos):
    recipe = ImageFolder(photos, train=False, size=32, labelled=False)
    (images, *_) = batches(recipe, 7)
    assert isinstance(images, torch.Tensor)
    assert images.shape == (7, 3, 32, 32)


def test_grey_and_transparent_images_become_rgb(tmp_path):
    folder = tmp_path / "all" / "x"
    folder.mkdir(parents=True)
    Image.new("L", (40, 40), 100).save(folder / "grey.jpg")
    Image.new("RGBA", (40, 40), (100, 100, 100, 255)).save(folder / "transparent.png")
    recipe = ImageFolder(tmp_path / "all", train=False, size=32, resize=32, dtype=torch.uint8)
    images, _ = batches(recipe)[0]
    assert (images == 100).all()


def test_a_missing_folder_is_named():
    with pytest.raises(FileNotFoundError, match="root='nowhere' is no folder"):
        ImageFolder("nowhere", train=True)


def test_an_empty_class_is_named(photos, tmp_path):
    (tmp_path / "full").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "full" / "a.png")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ValueError, match=r"the class '.*hollow' holds no image"):
        ImageFolder(tmp_path, train=True)


def test_a_folder_without_classes_is_refused(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="holds no folder: give the folder above those of the classes"):
        ImageFolder(tmp_path, train=True)
    assert len(ImageFolder(tmp_path, train=False, labelled=False).files) == 1
    with pytest.raises(ValueError, match="holds no image"):
        ImageFolder(make_empty(tmp_path), train=False, labelled=False)


def make_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"size": 64, "resize": 32}, "resize at least size"),
        ({"dtype": torch.bfloat16}, r"dtype=torch.bfloat16: accepted are torch.float32, torch.float16, torch.uint8"),
        ({"mean": (0.5,)}, "give three numbers each"),
        ({"std": (0.1, 0.0, 0.1)}, "std above zero"),
        ({"area": (0.5, 0.1)}, "give two rising fractions"),
        ({"ratio": (0, 1)}, "give two rising numbers above 0"),
        ({"size": None}, "size=None, resize=None: size must be at least 1"),
        ({"size": 8, "resize": math.nan}, "size=8, resize=nan: .* resize at least size"),
        ({"mean": (0.5, 0.5, math.nan)}, "give three numbers each"),
        ({"std": 0.2}, "give three numbers each"),
        ({"area": None}, "give two rising fractions"),
        ({"ratio": (1, math.inf)}, "give two rising numbers above 0"),
    ],
)
def test_wrong_arguments_are_refused(photos, wrong, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(photos, train=True, **wrong)


@pytest.mark.parametrize("switch", ["train", "channels_last", "mirror", "shuffle", "labelled", "index"])
def test_a_switch_is_a_bool(photos, switch):
    with pytest.raises(TypeError, match=f"{switch}='no' is no bool; accepted are True and False"):
        ImageFolder(photos, **{"train": True, switch: "no"})


@pytest.mark.parametrize("spoil", ["cut", "text", "gone"])
@pytest.mark.parametrize("train", [False, True])
def test_a_file_that_cannot_be_decoded_is_named(tmp_path, spoil, train):
    root = make_photos(tmp_path / "photos", per_class=4, suffixes=(".jpg",))
    recipe = ImageFolder(root, train=train, size=32, shuffle=False)
    bad = recipe.files[6]
    if spoil == "gone":
        (tmp_path / bad).unlink()
    else:
        (tmp_path / bad).write_bytes((tmp_path / bad).read_bytes()[:700] if spoil == "cut" else b"no image")
    loader = DALILoader(recipe, 4, num_threads=1)
    batch = iter(loader)
    assert len(next(batch)[1]) == 4
    with pytest.raises(ValueError, match=rf"{bad}.* could not be made a sample"):
        next(batch)
    # The next epoch starts at its beginning, as far as the file allows.
    assert next(iter(loader))[1].tolist() == [0, 0, 0, 0]
    loader.close()
