"""``ImageFolder``: a predefined pipeline for JPEG and PNG images in one folder per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_turbo._checks import check_switches, expect, is_number, is_whole
from lightning_turbo.data.folders import find_classes, list_files
from lightning_turbo.data.normalize import Normalize

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageFolder"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = (".jpg", ".jpeg", ".png")
BEGINNINGS = (b"\xff\xd8", b"\x89PNG\r\n\x1a\n")  # of JPEG and PNG files
DTYPES = ("float32", "float16", "uint8")


class ImageFolder:
    """Decode, augment and normalize the images of a folder with one subfolder per class.

    Training crops a window of random area and aspect ratio, resizes it to ``size`` x ``size`` and mirrors it with
    probability 0.5. Evaluation resizes the shorter side to ``resize`` and crops the center. Resizing is linear with
    antialiasing. Images are converted to RGB and rotated according to their EXIF orientation.

    Args:
        root: Folder with one subfolder per class. Images may be nested deeper; hidden files and folders are ignored.
        train: ``True`` for random crops, mirroring and shuffling; ``False`` for evaluation.
        size: Height and width of the output in pixels.
        resize: Shorter side before the center crop in evaluation, in pixels. Default: ``size * 256 / 224``.
        dtype: ``torch.float32``, ``torch.float16``, or ``torch.uint8`` for pixels that ``normalizer()`` normalizes on
            the device, with a quarter of the bytes to copy.
        channels_last: Whether the memory format is channels-last. With uint8 it always is. The shape is (batch, 3,
            size, size) in both formats.
        mean: Mean of the three channels, for pixels in [0, 1].
        std: Standard deviation of the three channels, for pixels in [0, 1].
        area: Smallest and largest area of the training window as fractions of the image.
        ratio: Smallest and largest aspect ratio (width / height) of the training window.
        mirror: Whether to mirror training images with probability 0.5.
        shuffle: Whether to shuffle the images in each epoch. Default: the value of ``train``.
        labeled: ``False`` reads all images below ``root`` without labels.
        classes: Class names in the order of their labels. Default: the sorted subfolders. Pass the classes of the
            training set if some may be missing here.
        index: Whether to append the position of each image in ``files`` as the last output.

    Attributes:
        classes: Class names. A label is a position in it.
        files: Paths of the images.

    Raises:
        FileNotFoundError: If ``root`` does not exist.
        TypeError: If a switch is not a bool, or ``classes`` is not a sequence of names.
        ValueError: If there is no class, a class has no image, a subfolder is not in ``classes``, or an argument is out
            of range.

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
        labeled: bool = True,
        classes: Sequence[str] | None = None,
        index: bool = False,
    ) -> None:
        shuffle = train if shuffle is None else shuffle
        check_switches(train=train, channels_last=channels_last, mirror=mirror, labeled=labeled)
        check_switches(shuffle=shuffle, index=index)
        expect(is_whole(size, 1), "size", size, "an integer of at least 1")
        resize = round(size * 256 / 224) if resize is None else resize
        expect(is_whole(resize, size), "resize", resize, f"an integer of at least size={size}")
        expect(_are_numbers(mean, 3), "mean", mean, "three numbers")
        expect(_are_numbers(std, 3, above=0), "std", std, "three numbers above 0")
        _check_range("area", area, up_to=1)
        _check_range("ratio", ratio, up_to=float("inf"))
        self.dtype = str(dtype).removeprefix("torch.")
        expect(self.dtype in DTYPES, "dtype", dtype, f"one of {', '.join(f'torch.{name}' for name in DTYPES)}")
        self.size = size
        self.resize = resize
        self.shuffle = shuffle
        self.index = index
        self.channels_last = channels_last or self.dtype == "uint8"
        self.scaling = tuple(mean), tuple(std)
        # The random training window as DALI arguments; None in evaluation, which crops the center.
        self.window = {"random_area": list(area), "random_aspect_ratio": list(ratio)} if train else None
        self.mirrored = 0.5 if train and mirror else 0.0
        self.classes = ()
        files = list_files(root, SUFFIXES)
        labels = None
        if labeled:
            self.classes, files, labels = find_classes(Path(root), SUFFIXES, classes)
        self.files = tuple(map(str, files))
        self.labels = labels and np.asarray(labels, dtype=np.int64)
        what = f"a folder with images ({', '.join(SUFFIXES)}), in one subfolder per class unless labeled=False"
        expect(files, "root", str(root), what)

    def name_broken(self) -> str:
        """Return a sentence that names the files without a JPEG or PNG header, or an empty string."""
        broken = []
        for name in self.files:
            try:
                with open(name, "rb") as file:
                    begins_well = file.read(8).startswith(BEGINNINGS)
            except OSError:
                begins_well = False
            if not begins_well:
                broken.append(name)
        if not broken:
            return ""
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        return f"These files are not JPEG or PNG: {', '.join(broken[:3])}{more}. Remove or repair them."

    def definition(self) -> Callable[..., Any]:
        """Return the pipeline function as created by DALI's ``pipeline_def``."""
        import nvidia.dali as dali

        @dali.pipeline_def
        def pipeline(shard_id: int, num_shards: int, device: str, order_seed: int) -> Any:
            what = f"at least one for each of {num_shards} ranks"
            expect(len(self.files) >= num_shards, "files", len(self.files), what)
            # DALI shuffles its list of files with a constant seed. Ordering the list with our seed, identically on
            # every rank, makes the order depend on that seed and on the epoch for which the pipeline is built.
            order = np.arange(len(self.files))
            if self.shuffle:
                np.random.default_rng(order_seed).shuffle(order)
            # The labels are positions in the list of files; ``finish`` looks up the classes.
            encoded, number = dali.fn.readers.file(
                files=[self.files[n] for n in order],
                labels=order.tolist(),
                shuffle_after_epoch=self.shuffle,
                shard_id=shard_id,
                num_shards=num_shards,
                pad_last_batch=True,
                name="files",
            )
            return self._augment(dali, encoded, device), number

        return pipeline

    def finish(self, tensors: list[Tensor]) -> list[Tensor]:
        """Replace the file positions returned by DALI with labels."""
        images, numbers = tensors
        images = images.movedim(-1, 1) if self.channels_last else images  # a view
        rest = [] if self.labels is None else [torch.from_numpy(self.labels[numbers.numpy()])]
        if self.index:
            rest.append(numbers)
        return [images, *(part.to(images.device, non_blocking=True) for part in rest)]

    def _augment(self, dali: Any, encoded: Any, device: str) -> Any:
        """Define the DALI graph: decode, crop, resize, normalize."""
        fn = dali.fn
        types = dali.types
        image = self._decode(fn, encoded, device={"gpu": "mixed", "cpu": "cpu"}[device], output_type=types.RGB)
        mirrored = fn.random.coin_flip(probability=self.mirrored)
        if self.dtype == "uint8":
            return fn.flip(image, horizontal=mirrored)
        return fn.crop_mirror_normalize(
            image,
            mirror=mirrored,
            mean=[255 * value for value in self.scaling[0]],
            std=[255 * value for value in self.scaling[1]],
            dtype={"float16": types.FLOAT16, "float32": types.FLOAT}[self.dtype],
            output_layout="HWC" if self.channels_last else "CHW",
        )

    def _decode(self, fn: Any, encoded: Any, **decoder: Any) -> Any:
        """Decode and resize the random window for training, or the center for evaluation."""
        if self.window:
            cropped = fn.decoders.image_random_crop(encoded, **self.window, **decoder)
            return fn.resize(cropped, size=(self.size, self.size))
        # Smooth chroma makes the GPU decoder match the CPU decoder; it is too slow for training.
        image = fn.decoders.image(encoded, jpeg_fancy_upsampling=True, **decoder)
        image = fn.resize(image, resize_shorter=self.resize, subpixel_scale=False)
        return fn.crop(image, crop=(self.size, self.size))

    def normalizer(self, dtype: torch.dtype = torch.float32) -> Normalize:
        """Return the normalization of this folder's uint8 batches, to run on their device.

        Args:
            dtype: Floating-point dtype of the result.
        """
        return Normalize(*self.scaling, dtype=dtype)


def _are_numbers(values: Any, count: int, above: float = float("-inf")) -> bool:
    """Return whether ``values`` is a sequence of ``count`` finite numbers above a limit."""
    sequence = isinstance(values, (Sequence, np.ndarray)) and len(values) == count
    return sequence and all(is_number(value) and value > above for value in values)


def _check_range(name: str, values: Any, up_to: float) -> None:
    rising = _are_numbers(values, 2, above=0) and values[0] <= values[1] <= up_to
    expect(rising, name, values, f"two rising numbers above 0, at most {up_to}")
