"""A folder of JPEG and PNG images, one folder a class, as a ready pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, is_whole
from lightning_turbo.data.dali.recipe import FileRecipe, are_numbers, check_dtype
from lightning_turbo.data.normalize import Normalize

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageFolder"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder(FileRecipe):
    """Images of a folder with one subfolder a class, decoded, augmented and normalised.

    Training: a window of random area and aspect ratio is decoded (fused with the decoder), resized to
    ``size`` x ``size``, mirrored with probability one half and normalised. A window that would stick out of the image
    is cut at its border. Evaluation: the shorter side is resized to ``resize``, the centre is cropped and normalised.
    Resizing is linear with antialiasing. Every image becomes RGB.

    Args:
        root: Folder whose subfolders are the classes, numbered in sorted order; images may lie deeper.
        train: ``True`` for random crops, mirroring and shuffling; ``False`` for evaluation.
        size: Height and width of the output, in pixels.
        resize: Shorter side before the centre crop of the evaluation, in pixels; by default ``size * 256 / 224``.
        dtype: ``torch.float32``, ``torch.float16``, or ``torch.uint8`` for pixels that ``normalizer()`` normalises
            later on the device: a quarter of the bytes to copy.
        channels_last: Whether batches are laid out in memory as channels-last; always so with uint8. The shape is
            (batch, 3, size, size) either way.
        mean: Mean of the three channels, of pixels between 0 and 1.
        std: Standard deviation of the three channels, of pixels between 0 and 1.
        area: Smallest and largest area of the training window, as fractions of the image.
        ratio: Smallest and largest aspect ratio (width / height) of the training window.
        mirror: Whether half of the training images are mirrored.
        shuffle: Whether each epoch has a new order; by default the value of ``train``.
        labelled: ``False`` takes every image below ``root``, without classes and labels.
        index: Whether the last output is the number of the image in ``files``.

    Attributes:
        classes: Names of the classes; a label is a place in it.
        files: Paths of the images.

    Raises:
        FileNotFoundError: If ``root`` is no folder.
        TypeError: If a switch is no bool.
        ValueError: If there is no class, a class without an image, or an argument out of its range.

    Note:
        The orientation in a photograph's EXIF data is applied.

    Source: Szegedy et al., Going deeper with convolutions, 2015 (random crops); He et al., Deep residual learning,
    2016 (evaluation).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        train: bool,
        size: int = 224,
        resize: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        channels_last: bool = False,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        area: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        mirror: bool = True,
        shuffle: bool | None = None,
        labelled: bool = True,
        index: bool = False,
    ) -> None:
        check_switches(train=train, channels_last=channels_last, mirror=mirror, labelled=labelled)
        resize = round(size * 256 / 224) if resize is None and is_whole(size, 1) else resize
        if not is_whole(size, 1) or not is_whole(resize, size):
            raise ValueError(f"size={size!r}, resize={resize!r}: size must be at least 1 and resize at least size.")
        if not (are_numbers(mean, 3) and are_numbers(std, 3) and min(std) > 0):
            raise ValueError(f"mean={mean!r}, std={std!r}: give three numbers each, and std above zero.")
        if not (are_numbers(area, 2) and 0 < area[0] <= area[1] <= 1):
            raise ValueError(f"area={area!r}: give two rising fractions of the image, above 0 and up to 1.")
        if not (are_numbers(ratio, 2) and 0 < ratio[0] <= ratio[1]):
            raise ValueError(f"ratio={ratio!r}: give two rising numbers above 0.")
        self.root, self.train, self.size, self.resize = Path(root), train, size, resize
        self.dtype = check_dtype(dtype, ("float32", "float16", "uint8"))
        self.channels_last = channels_last or self.dtype == "uint8"
        self.mean, self.std, self.area, self.ratio, self.mirror = tuple(mean), tuple(std), area, ratio, mirror
        self.classes, files, labels = _found(self.root, labelled)
        super().__init__(files, labels, shuffle=train if shuffle is None else shuffle, index=index)

    def draw(self, generator: np.random.Generator, batch: int) -> dict[str, np.ndarray]:
        """Draw window and mirroring of each image; nothing in evaluation."""
        if not self.train:
            return {}
        low, high = np.log(self.ratio)
        area, ratio = generator.uniform(*self.area, batch), np.exp(generator.uniform(low, high, batch))
        return {
            "squares": np.stack([area / ratio, area * ratio], axis=1).astype(np.float32),
            "place": generator.random((batch, 2), dtype=np.float32),
            "mirrored": generator.integers(0, 1 + self.mirror, batch, dtype=np.int32),
        }

    def define(self, dali: Any, encoded: Any, device: str, **drawn: Any) -> Any:
        """Return decoding, cropping, resizing and normalisation as a DALI graph."""
        fn, types = dali.fn, dali.types
        decoder = "mixed" if device == "gpu" else "cpu"
        if self.train:
            start, shape = _window(dali, encoded, drawn["squares"], drawn["place"])
            image = fn.decoders.image_slice(
                encoded,
                start,
                shape,
                normalized_anchor=False,
                normalized_shape=False,
                axis_names="HW",
                device=decoder,
                output_type=types.RGB,
            )
            image = fn.resize(image, size=(self.size, self.size))
        else:
            # Smooth chroma makes the GPU's decoder agree with the CPU's; it costs too much for training.
            image = fn.decoders.image(encoded, device=decoder, output_type=types.RGB, jpeg_fancy_upsampling=True)
            image = fn.resize(image, resize_shorter=self.resize, subpixel_scale=False)
        mirrored = drawn.get("mirrored", 0)
        if self.dtype == "uint8":
            image = image if self.train else fn.crop(image, crop=(self.size, self.size))
            return fn.flip(image, horizontal=mirrored) if self.train else image
        return fn.crop_mirror_normalize(
            image,
            crop=(self.size, self.size),
            mirror=mirrored,
            mean=[255 * value for value in self.mean],
            std=[255 * value for value in self.std],
            dtype=types.FLOAT16 if self.dtype == "float16" else types.FLOAT,
            output_layout="HWC" if self.channels_last else "CHW",
        )

    def finish(self, batch: Tensor) -> Tensor:
        """Return the batch in shape (batch, 3, size, size), a view if its channels lie last."""
        return batch.permute(0, 3, 1, 2) if self.channels_last else batch

    def normalizer(self, dtype: torch.dtype = torch.float32) -> Normalize:
        """Return what normalises the uint8 batches of this folder, on the device that they are on.

        Args:
            dtype: Floating-point type of the result.
        """
        return Normalize(self.mean, self.std, dtype=dtype)


def _found(root: Path, labelled: bool) -> tuple[tuple[str, ...], list[str], list[int] | None]:
    """The classes of a folder, its images in sorted order and their labels."""
    if not root.is_dir():
        raise FileNotFoundError(f"root={str(root)!r} is no folder. Give the folder that holds the images.")
    if not labelled:
        if not (files := _images(root)):
            raise ValueError(f"root={str(root)!r} holds no image ({', '.join(SUFFIXES)}).")
        return (), files, None
    classes = tuple(sorted(entry.name for entry in os.scandir(root) if entry.is_dir()))
    if not classes:
        raise ValueError(
            f"root={str(root)!r} holds no folder: give the folder above those of the classes, or labelled=False."
        )
    files, labels = [], []
    for label, name in enumerate(classes):
        if not (found := _images(root / name)):
            raise ValueError(
                f"the class {str(root / name)!r} holds no image ({', '.join(SUFFIXES)}). Remove the folder or fill it."
            )
        files += found
        labels += [label] * len(found)
    return classes, files, labels


def _images(folder: Path) -> list[str]:
    return sorted(
        os.path.join(where, name)
        for where, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES)
    )


def _window(dali: Any, encoded: Any, squares: Any, place: Any) -> tuple[Any, Any]:
    """Start and shape of a window, in pixels, each as (y, x).

    Few operators, because each costs as much as decoding a part of an image.

    Args:
        dali: The module.
        encoded: The bytes of the images.
        squares: Squares of the window's height and width, in units of the image's area.
        place: Where the window lies, from 0 at the top left to 1 at the bottom right.
    """
    image = dali.fn.peek_image_shape(encoded, dtype=dali.types.FLOAT)[:2]
    shape = dali.math.min(dali.math.sqrt(squares * (image[0] * image[1])), image)
    return place * (image - shape), shape
