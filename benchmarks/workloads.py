"""Networks, data and plain PyTorch loops that several suites share."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.meter import Meter

__all__ = ["DTYPES", "Batch", "Endless", "Losses", "conv_net", "image_batches", "plain_loop", "resnet50", "sgd"]

Batch = tuple[Tensor, Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Endless:
    """The same few batches over and over, so that loading costs nothing and no epoch ends.

    Args:
        batches: What to repeat.
    """

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self.batches)


class Losses:
    """The losses of the last steps, kept on their device until the end.

    Args:
        last: How many.
    """

    def __init__(self, last: int = 8) -> None:
        self._kept: deque[Tensor] = deque(maxlen=last)

    def add(self, loss: Tensor) -> None:
        """Note the loss of a step."""
        self._kept.append(loss.detach())

    def mean(self) -> float:
        """Return the mean of those kept, as a number."""
        return torch.stack([loss.float() for loss in self._kept]).mean().item()


class _Block(nn.Module):
    """Two convolutions with batch norm around a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inside == outside
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def conv_net(classes: int = 10, width: int = 32) -> nn.Module:
    """Build a small residual network for images of ``(batch, 3, 32, 32)``.

    Args:
        classes: Number of outputs.
        width: Channels of the first stage; the second and third have twice and four times as many.
    """
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        _Block(width, width, 1),
        _Block(width, 2 * width, 2),
        _Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


class _Bottleneck(nn.Module):
    """Three convolutions with batch norm around a shortcut, the middle one four times as narrow as the output."""

    def __init__(self, conv: type[nn.Module], norm: type[nn.Module], inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            conv(inside, width, 1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            conv(width, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            conv(width, outside, 1, bias=False),
            norm(outside),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inside == outside
            else nn.Sequential(conv(inside, outside, 1, stride, bias=False), norm(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(dims: int, classes: int) -> nn.Module:
    """Build a ResNet-50: torchvision's in 2D; in 3D MONAI's without bias, whose first convolution has stride 1.

    Args:
        dims: 2 for images with three channels, 3 for volumes with one.
        classes: Number of outputs.
    """
    conv, norm, pool, mean, inputs, stride = (
        (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, 3, 2)
        if dims == 2
        else (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d, 1, 1)
    )
    layers = [conv(inputs, 64, 7, stride, 3, bias=False), norm(64), nn.ReLU(inplace=True), pool(3, 2, 1)]
    inside = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            layers.append(_Bottleneck(conv, norm, inside, width, 2 if number == 0 and width > 64 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, mean(1), nn.Flatten(), nn.Linear(inside, classes))


def image_batches(meter: Meter, shape: tuple[int, ...], classes: int, batch: int, count: int = 4) -> list[Batch]:
    """Make labelled noise on the meter's device, with a faint pattern for each class that can be learned.

    Args:
        meter: Gives device and seed.
        shape: Of one image, channels first.
        classes: Number of labels.
        batch: Samples a batch.
        count: How many batches.
    """
    generator = torch.Generator().manual_seed(meter.seed)
    patterns = torch.randn(classes, *shape, generator=generator)
    batches = []
    for _ in range(count):
        labels = torch.randint(classes, (batch,), generator=generator)
        images = torch.randn(batch, *shape, generator=generator) + 0.1 * patterns[labels]
        batches.append((images.to(meter.device), labels.to(meter.device)))
    return batches


def sgd(
    parameters: Iterator[nn.Parameter] | list[Tensor], fused: bool = False, learning_rate: float = 0.02
) -> Optimizer:
    """Build the optimizer of all these cases: SGD with momentum, fused where asked, else foreach."""
    kind = {"fused": True} if fused else {"foreach": True}
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9, **kind)


def plain_loop(
    meter: Meter,
    net: nn.Module,
    loader: Endless,
    optimizer: Optimizer,
    *,
    forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    input_dtype: torch.dtype | None = None,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], None] | None = None,
    clear: Callable[[], object] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, float]:
    """Train without any library but torch until the meter says stop.

    Args:
        meter: Of the case.
        net: On its device.
        loader: Yields images and labels on that device.
        optimizer: Of the network or of its masters.
        forward: Makes the context of the forward pass.
        input_dtype: What images are cast to.
        before_step: Called between backward and the optimizer's step.
        after_step: Called after it.
        clear: Releases the gradients; ``None`` calls the optimizer's ``zero_grad``.
        scaler: Scales the loss, for float16 under autocast.

    Returns:
        The mean of the last losses.
    """
    losses = Losses()
    clear = optimizer.zero_grad if clear is None else clear
    for images, labels in loader:
        images = images if input_dtype is None else images.to(input_dtype)
        with forward():
            loss = F.cross_entropy(net(images).float(), labels)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if before_step is not None:
            before_step()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if after_step is not None:
            after_step()
        clear()
        losses.add(loss)
        if not meter.step(samples=len(labels)):
            break
    return {"loss": losses.mean()}
