"""What cases without Lightning share: networks, data, and a plain PyTorch loop."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.suite import CaseTimer

__all__ = [
    "DTYPES", "Batch", "Endless", "Losses", "conv_net", "image_batches", "plain_loop", "resnet50", "sgd", "toy_net",
]  # fmt: skip

Batch = tuple[Tensor, Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Endless:
    """Repeats a few batches forever, so that loading costs nothing and no epoch ends."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self.batches)


class Losses:
    """The losses of steps 23 to 30, or of the last eight of fewer steps; they stay on their device until ``mean``."""

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque(maxlen=8)
        self._left = 30

    def add(self, loss: Tensor) -> None:
        """Record the loss of a step."""
        if self._left:
            self._left -= 1
            self._kept.append(loss.detach())

    def mean(self) -> float:
        """Return the mean of the recorded losses."""
        return torch.stack([loss.float() for loss in self._kept]).mean().item()


class _Residual(nn.Module):
    """Adds a shortcut to the output of some layers, with a convolution where the shape changes."""

    def __init__(self, layers: list[nn.Module], shortcut: list[nn.Module], inplace: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(*shortcut) if shortcut else nn.Identity()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=self.inplace)


def _block(inside: int, outside: int, stride: int) -> nn.Module:
    """Build a residual block of two convolutions with batch norm."""
    first, second = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
    layers = [first, second, nn.ReLU(), nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)]
    same = stride == 1 and inside == outside
    shortcut = [] if same else [nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)]
    return _Residual(layers, shortcut, inplace=False)


def conv_net(classes: int = 10, width: int = 32) -> nn.Module:
    """Build a small residual network for images of shape ``(batch, 3, 32, 32)``; it starts with ``width`` channels."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [_block(width, width, 1), _block(width, 2 * width, 2), _block(2 * width, 4 * width, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def resnet50(dims: int, classes: int) -> nn.Module:
    """Build a ResNet-50: in 2D that of torchvision; in 3D that of MONAI without bias, whose first stride is 1.

    Args:
        dims: 2 for images with three channels, 3 for volumes with one channel.
        classes: Number of logits.
    """
    conv, norm, pool, mean, inputs, stride = (
        (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, 3, 2)
        if dims == 2
        else (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d, 1, 1)
    )

    def bottleneck(inside: int, width: int, stride: int) -> nn.Module:
        layers: list[nn.Module] = [conv(inside, width, 1, bias=False), norm(width), nn.ReLU(inplace=True)]
        layers += [conv(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU(inplace=True)]
        layers += [conv(width, 4 * width, 1, bias=False), norm(4 * width)]
        same = stride == 1 and inside == 4 * width
        shortcut = [] if same else [conv(inside, 4 * width, 1, stride, bias=False), norm(4 * width)]
        return _Residual(layers, shortcut, inplace=True)

    layers = [conv(inputs, 64, 7, stride, 3, bias=False), norm(64), nn.ReLU(inplace=True), pool(3, 2, 1)]
    inside = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            layers.append(bottleneck(inside, width, 2 if number == 0 and width > 64 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, mean(1), nn.Flatten(), nn.Linear(inside, classes))


def toy_net() -> nn.Module:
    """Build a network that takes hardly any time, for inputs of shape ``(batch, 32)``."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def image_batches(timer: CaseTimer, shape: tuple[int, ...], classes: int, batch: int, count: int = 4) -> list[Batch]:
    """Make batches of noise with labels on the device; each class adds a faint pattern that can be learned.

    Args:
        timer: Timer of the case, for device and seed.
        shape: Shape of one image, channels first.
        classes: Number of classes.
        batch: Number of samples per batch.
        count: Number of batches.
    """
    generator = torch.Generator().manual_seed(timer.seed)
    patterns = torch.randn(classes, *shape, generator=generator)
    batches = []
    for _ in range(count):
        labels = torch.randint(classes, (batch,), generator=generator)
        images = torch.randn(batch, *shape, generator=generator) + 0.1 * patterns[labels]
        batches.append((images.to(timer.device), labels.to(timer.device)))
    return batches


def sgd(parameters: Iterable[Tensor], fused: bool = False, learning_rate: float = 0.02) -> Optimizer:
    """Build the optimizer of most cases: SGD with momentum, fused or with foreach."""
    return torch.optim.SGD(list(parameters), lr=learning_rate, momentum=0.9, fused=fused or None, foreach=not fused)


def plain_loop(
    timer: CaseTimer,
    net: nn.Module,
    batches: Iterable[Batch],
    optimizer: Optimizer,
    *,
    forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    backward: Callable[[Tensor], object] = Tensor.backward,
    step: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Train with plain PyTorch until ``timer.step`` returns ``False``.

    Args:
        timer: Timer of the case.
        net: Network on the device.
        batches: Endless images and labels on the device.
        optimizer: Optimizer of the network.
        forward: Returns a context manager for the forward pass.
        backward: Called with the loss; runs the backward pass.
        step: Updates the weights and clears the gradients. If ``None``, ``step`` and ``zero_grad`` of the optimizer are
            called.

    Returns:
        The mean loss, as in ``Losses``.
    """
    losses = Losses()
    for images, labels in batches:
        with forward():
            loss = F.cross_entropy(net(images).float(), labels)
        backward(loss)
        if step is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            step()
        losses.add(loss)
        if not timer.step(samples=len(labels)):
            break
    return {"loss": losses.mean()}
