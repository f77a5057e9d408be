"""``ImageFolder``, JPEG and PNG images with one folder a class, as a ready pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, is_whole
from lightning_turbo.data.dali.files import FilePipeline, are_numbers, check_dtype, import_dali
from lightning_turbo.data.folders import check_classes, find_classes, list_files
from lightning_turbo.data.normalize import Normalize

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageFolder"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder(FilePipeline):
    """Images of a folder with one subfolder a class, decoded, augmented and normalised.

    Training: a window of random area and aspect ratio is decoded, resized to ``size`` x ``size``, mirrored with
    probability one half and normalised. Evaluation: the shorter side is resized to ``resize``, the centre is cropped
    and normalised. Resizing is linear with antialiasing. Every image becomes RGB.

    Args:
        root: Folder whose subfolders are the classes; images may lie deeper. Hidden files and folders do not count.
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
        classes: Names of the classes in the order of their numbers; by default the subfolders, sorted. Pass those of
            the training set where a class may be missing.
        index: Whether the last output is the number of the image in ``files``.

    Attributes:
        classes: Names of the classes; a label is a position in it.
        files: Paths of the images.

    Raises:
        FileNotFoundError: If ``root`` is not a folder.
        TypeError: If a switch is not a bool, or ``classes`` not a sequence of names.
        ValueError: If there is no class, a class without an image, a folder that is not in ``classes``, or an argument
            is out of its range.

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
        classes: Sequence[str] | None = None,
        index: bool = False,
    ) -> None:
        check_switches(train=train, channels_last=channels_last, mirror=mirror, labelled=labelled)
        resize = round(size * 256 / 224) if resize is None and is_whole(size, 1) else resize
        if not is_whole(size, 1) or not is_whole(resize, size):
            raise ValueError(f"size={size!r}, resize={resize!r}: size must be at least 1 and resize at least size.")
        if not (are_numbers(mean, 3) and are_numbers(std, 3) and min(std) > 0):
            raise ValueError(f"mean={mean!r}, std={std!r}: expected three numbers each, and std above zero.")
        _check_range("area", area, above=0, up_to=1)
        _check_range("ratio", ratio, above=0)
        self.root, self.train, self.size, self.resize = Path(root), train, size, resize
        self.dtype = check_dtype(dtype, ("float32", "float16", "uint8"))
        self.channels_last = channels_last or self.dtype == "uint8"
        self.mean, self.std, self.area, self.ratio, self.mirror = tuple(mean), tuple(std), area, ratio, mirror
        self.classes, files, labels = _find_images(self.root, labelled, check_classes(classes))
        super().__init__(files, labels, shuffle=train if shuffle is None else shuffle, index=index)

    def define(self, dali: Any, encoded: Any, device: str) -> Any:
        """Return decoding, cropping, resizing and normalisation as a DALI graph."""
        fn, types = dali.fn, dali.types
        image = self._decode(fn, encoded, device={"gpu": "mixed", "cpu": "cpu"}[device], output_type=types.RGB)
        mirrored = fn.random.coin_flip(probability=0.5 * (self.train and self.mirror))
        if self.dtype == "uint8":
            return fn.flip(image, horizontal=mirrored)
        return fn.crop_mirror_normalize(
            image,
            mirror=mirrored,
            mean=(255 * np.array(self.mean)).tolist(),
            std=(255 * np.array(self.std)).tolist(),
            dtype={"float16": types.FLOAT16, "float32": types.FLOAT}[self.dtype],
            output_layout="HWC" if self.channels_last else "CHW",
        )

    def _decode(self, fn: Any, encoded: Any, **decoder: Any) -> Any:
        """Decode and resize, with training's random window or evaluation's centre."""
        if self.train:
            window = {"random_area": list(self.area), "random_aspect_ratio": list(self.ratio)}
            return fn.resize(fn.decoders.image_random_crop(encoded, **window, **decoder), size=(self.size, self.size))
        # Smooth chroma makes the GPU's decoder agree with the CPU's; it costs too much for training.
        image = fn.decoders.image(encoded, jpeg_fancy_upsampling=True, **decoder)
        image = fn.resize(image, resize_shorter=self.resize, subpixel_scale=False)
        return fn.crop(image, crop=(self.size, self.size))

    def view(self, batch: Tensor) -> Tensor:
        """Return the batch in shape (batch, 3, size, size)."""
        return batch.permute(0, 3, 1, 2) if self.channels_last else batch

    def normalizer(self, dtype: torch.dtype = torch.float32) -> Normalize:
        """Return what normalises the uint8 batches of this folder, on the device that they are on.

        Args:
            dtype: Floating-point type of the result.
        """
        return Normalize(self.mean, self.std, dtype=dtype)

    def find_broken(self) -> str | None:
        """Return the first file whose header DALI cannot read."""
        dali = import_dali()

        @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
        def headers() -> Any:
            return dali.fn.peek_image_shape(dali.fn.readers.file(files=list(self.files))[0])

        pipeline: Any = headers()
        for file in self.files:
            try:
                pipeline.run()
            except RuntimeError:
                return file
        return None


def _check_range(name: str, values: Any, *, above: float, up_to: float = float("inf")) -> None:
    if not (are_numbers(values, 2) and above < values[0] <= values[1] <= up_to):
        limit = f" and up to {up_to}" if up_to < float("inf") else ""
        raise ValueError(f"{name}={values!r}: expected two rising numbers above {above}{limit}.")


def _find_images(
    root: Path, labelled: bool, classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], list[str], list[int] | None]:
    """Return the classes of a folder, its images in sorted order and their labels."""
    if not root.is_dir():
        raise FileNotFoundError(f"root={str(root)!r} is not a folder. Pass the folder that holds the images.")
    if labelled:
        names, files, labels = find_classes(root, SUFFIXES, classes)
    else:
        names, files, labels = (), list_files(root, SUFFIXES), None
    if labelled and not names:
        raise ValueError(
            f"root={str(root)!r} holds no folder: pass the folder above those of the classes, or labelled=False."
        )
    if not files:
        raise ValueError(f"root={str(root)!r} holds no image ({', '.join(SUFFIXES)}).")
    return names, [str(file) for file in files], labels
