"""Transforms that mix each sample with its neighbour in the batch, and the labels with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_turbo._checks import expect, is_number, is_whole
from lightning_turbo.data.augment.draws import Draws
from lightning_turbo.data.augment.transform import Parts, Transform, per_sample

__all__ = ["CutMix", "MixUp"]


class MixUp(Transform):
    """Mix each image, and its label, with the one before it in the batch: ``lam * x + (1 - lam) * neighbour``.

    ``lam`` is drawn for each sample from ``Beta(alpha, alpha)``. The neighbour depends on the order of the batches.
    Labels come back as probabilities, float32 of shape ``(n, classes)``, which ``cross_entropy`` takes.

    Args:
        num_classes: How many classes integer labels stand for, 2 or more; ``None`` for labels that are probabilities.
        alpha: Of the beta distribution, above 0.
        p: The probability with which a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if there is no label or there are masks.

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018); torchvision's ``MixUp``.
    """

    def __init__(self, num_classes: int | None = None, alpha: float = 1.0, *, p: float = 1.0) -> None:
        super().__init__(p)
        name = type(self).__name__
        classes = num_classes is None or is_whole(num_classes, 2)
        expect(classes, f"{name}: num_classes", num_classes, "an integer of 2 or more, or None")
        expect(is_number(alpha) and alpha > 0, f"{name}: alpha", alpha, "a number above 0")
        self.num_classes = num_classes
        self.alpha = float(alpha)

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Change images and labels."""
        # A mixed mask would hold classes that do not exist, and an image that is mixed needs its label mixed alike.
        if parts.masks or parts.label is None:
            got = "masks" if parts.masks else "label=None"
            raise ValueError(
                f"MixUp: expected images with a label and no masks, got {got}. Pass label=, or use CutMix."
            )
        share = self._share(draws)
        parts.images = [self.blend(image, share) for image in parts.images]
        parts.label = self.blend(self._probabilities(parts.label), share)

    def _share(self, draws: Draws) -> Tensor:
        """Draw the share of each sample in what becomes of it; 1 where it stays."""
        rows = draws.rows(self.p)
        drawn = draws.beta(self.alpha)
        return torch.ones_like(drawn).index_copy(0, rows, drawn[rows])

    @staticmethod
    def blend(batch: Tensor, share: Tensor) -> Tensor:
        """Return each sample times its share and its neighbour times the rest."""
        # Samples that stay keep their bits: with a NaN in the neighbour, 0 times it would be one too.
        weight = per_sample(share, batch)
        return torch.where(weight == 1, batch, batch * weight + batch.roll(1, 0) * (1 - weight))

    def _probabilities(self, label: Tensor) -> Tensor:
        """Return labels as probabilities of classes."""
        name = type(self).__name__
        got = f"{tuple(label.shape)} of {label.dtype}"
        if label.is_floating_point():
            expect(label.dim() == 2, f"{name}: label", got, "probabilities of shape (n, classes)")
            return label
        expect(label.dim() == 1, f"{name}: label", got, "integers of shape (n,)")
        if self.num_classes is None:
            raise ValueError(f"{name}: num_classes: expected an integer for labels of {label.dtype}, got None.")
        return F.one_hot(label.long(), self.num_classes).float()


class CutMix(MixUp):
    """Replace a box of each image, and of its masks, by that of the one before it in the batch.

    The box has the shape of the image and the share ``1 - lam`` of its volume, as far as it lies inside; ``lam`` is
    drawn from ``Beta(alpha, alpha)``. Labels mix by the share that was replaced.

    Args:
        num_classes: How many classes integer labels stand for, 2 or more; ``None`` without labels, or for labels that
            are probabilities.
        alpha: Of the beta distribution, above 0.
        p: The probability with which a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if there are neither labels nor masks.

    Source: Yun et al., "CutMix" (2019); torchvision's ``CutMix``.
    """

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Change images, masks and labels."""
        if parts.label is None and not parts.masks:
            raise ValueError("CutMix: expected label= or mask=, got neither.")
        axes = len(parts.space)
        share = self._share(draws)
        # The box has the image's shape, so that each edge is the root of the share; what hangs over an end is cut off,
        # and the labels follow what is really inside.
        half = (1 - share).pow(1 / axes)[:, None] / 2
        centre = draws.uniform(0, 1, axes)
        size = torch.tensor(parts.space)
        ends = [((centre + sign * half).clamp(0, 1) * size).round().long() for sign in (-1, 1)]
        parts.images = [self.paste(image, *ends) for image in parts.images]
        parts.masks = [self.paste(mask, *ends) for mask in parts.masks]
        if parts.label is not None:
            replaced = ((ends[1] - ends[0]) / size).prod(1)
            parts.label = self.blend(self._probabilities(parts.label), 1 - replaced)

    @staticmethod
    def paste(batch: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Return each sample with the box from ``begin`` to ``end``, ``(n, axes)``, of its neighbour."""
        begin, end = (each.to(batch.device, non_blocking=True) for each in (begin, end))
        inside = torch.ones(len(batch), *[1] * (batch.dim() - 1), dtype=torch.bool, device=batch.device)
        for axis in range(2, batch.dim()):
            at = torch.arange(batch.shape[axis], device=batch.device)
            one = (at >= begin[:, axis - 2, None]) & (at < end[:, axis - 2, None])
            inside = inside & one.view(len(batch), *[-1 if each == axis else 1 for each in range(1, batch.dim())])
        return torch.where(inside, batch.roll(1, 0), batch)
