"""ImageFolder: what it finds, what it makes of an image, and what it refuses."""

import io
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


def test_evaluation_equals_pillow(photos):
    recipe = ImageFolder(photos, train=False, size=48, resize=56)
    assert recipe.classes == CLASSES
    assert recipe.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    unlabelled = ImageFolder(photos, train=False, size=48, resize=56, labelled=False)
    assert torch.equal(batches(unlabelled)[0], batches(recipe)[0][0])  # a single output is the tensor itself
    got = torch.cat([images for images, _ in batches(recipe)])
    mean, std = (np.array(v, dtype=np.float32) * 255 for v in (IMAGENET_MEAN, IMAGENET_STD))
    for image, file in zip(got, recipe.files, strict=True):
        pixels = image.permute(1, 2, 0).numpy() * std + mean
        difference = np.abs(pixels - reference(file, 48, 56))
        # Both decode to the same pixels. Pillow rounds to whole levels after each of its two passes, DALI once at the
        # end: one level of 255, and float32's rounding of the normalisation.
        assert difference.max() < 1.01, file
        assert difference.mean() < 0.3, file


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


def test_grey_and_transparent_images_become_rgb(tmp_path):
    folder = tmp_path / "all" / "x"
    folder.mkdir(parents=True)
    Image.new("L", (40, 40), 100).save(folder / "grey.jpg")
    Image.new("RGBA", (40, 40), (100, 100, 100, 255)).save(folder / "transparent.png")
    recipe = ImageFolder(tmp_path / "all", train=False, size=32, resize=32, dtype=torch.uint8)
    images, _ = batches(recipe)[0]
    assert (images == 100).all()


def grow(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name)
    return root


@pytest.mark.parametrize("classes", [None, ("cat", "dog", "fox"), ["fox", "dog", "cat", "owl"]])
@pytest.mark.parametrize("missing", [(), ("dog",), ("cat", "fox")])
def test_a_label_means_the_same_class_whatever_is_missing(tmp_path, classes, missing):
    grow(tmp_path, *(f"{name}/deeper/{n}.png" for name in ("cat", "dog", "fox") if name not in missing for n in "ab"))
    (tmp_path / ".ipynb_checkpoints").mkdir()
    recipe = ImageFolder(tmp_path, train=False, classes=classes)
    assert recipe.classes == tuple(classes or sorted({"cat", "dog", "fox"} - set(missing)))
    assert [recipe.classes[label] for label in recipe.labels] == [Path(file).parts[-3] for file in recipe.files]


def test_what_a_folder_may_hold(tmp_path):
    with pytest.raises(FileNotFoundError, match="root='nowhere' is not a folder"):
        ImageFolder("nowhere", train=True)
    grow(tmp_path, "a.png", ".hidden.png", ".thumbs/b.png")
    with pytest.raises(ValueError, match="holds no folder: pass the folder above those of the classes"):
        ImageFolder(tmp_path, train=True)
    assert len(ImageFolder(tmp_path, train=False, labelled=False).files) == 1
    (tmp_path / "hollow").mkdir()
    for labelled, message in (
        (True, r"The class '.*hollow' holds no file that ends in .jpg"),
        (False, "holds no image"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageFolder(tmp_path if labelled else tmp_path / "hollow", train=True, labelled=labelled)
    grow(tmp_path, "full/a.png")
    assert ImageFolder(tmp_path, train=True, classes=["full", "hollow"]).labels.tolist() == [0]
    with pytest.raises(ValueError, match=r"holds the folders \['hollow'\], which are not in classes=\('full',\)"):
        ImageFolder(tmp_path, train=True, classes=["full"])
    for wrong, error in (("full", TypeError), (3, TypeError), ([], ValueError), ("aa", TypeError)):
        with pytest.raises(error, match="expected"):
            ImageFolder(tmp_path, train=True, classes=wrong)


@pytest.mark.parametrize("switch", ["train", "channels_last", "mirror", "shuffle", "labelled", "index"])
def test_a_switch_is_a_bool(photos, switch):
    with pytest.raises(TypeError, match=f"{switch}='no'"):
        ImageFolder(photos, **{"train": True, switch: "no"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"size": 64, "resize": 32}, "resize at least size"),
        ({"dtype": torch.bfloat16}, r"dtype=torch.bfloat16: expected one of torch.float32, torch.float16, torch.uint8"),
        ({"mean": (0.5,)}, "expected three numbers each"),
        ({"std": (0.1, 0.0, 0.1)}, "std above zero"),
        ({"area": (0.5, 0.1)}, "area=.*: expected two rising numbers above 0 and up to 1"),
        ({"ratio": (0, 1)}, "ratio=.*: expected two rising numbers above 0"),
        ({"size": None}, "size=None, resize=None: size must be at least 1"),
        ({"size": 8, "resize": math.nan}, "size=8, resize=nan: .* resize at least size"),
        ({"mean": (0.5, 0.5, math.nan)}, "expected three numbers each"),
        ({"std": 0.2}, "expected three numbers each"),
        ({"area": None}, "area=.*: expected two rising numbers above 0 and up to 1"),
        ({"ratio": (1, math.inf)}, "ratio=.*: expected two rising numbers above 0"),
    ],
)
def test_wrong_arguments_are_refused(photos, wrong, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(photos, train=True, **wrong)


def encode(image, kind):
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


SPOILED = {
    "text": lambda image: b"no image",
    "empty": lambda image: b"",
    "another format": lambda image: encode(image, "GIF"),
    "JPEG, 100 bytes of it": lambda image: encode(image, "JPEG")[:100],
    "JPEG, half of it": lambda image: encode(image, "JPEG")[:700],
    "PNG, 20 bytes of it": lambda image: encode(image, "PNG")[:20],
    "PNG, its pixels": lambda image: encode(image, "PNG")[:1000] + b"x" * 300 + encode(image, "PNG")[1300:],
    "gone": None,
}


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("train", [False, True])
def test_a_file_that_cannot_be_decoded_is_named(tmp_path, spoil, train):
    recipe = ImageFolder(make_photos(tmp_path, per_class=4, suffixes=(".jpg",)), train=train, size=32, shuffle=False)
    bad, good = Path(recipe.files[6]), Image.open(recipe.files[6])
    good.load()
    bad.unlink() if spoil == "gone" else bad.write_bytes(SPOILED[spoil](good))
    loader = DALILoader(recipe, 4, num_threads=1)
    with pytest.raises(ValueError, match=rf"{bad}.* could not be made a sample \(.+\)\. Repair the file or remove it"):
        list(loader)
    good.save(bad)
    assert torch.cat([labels for _, labels in loader]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    loader.close()
