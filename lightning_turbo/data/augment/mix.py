"""Transforms that mix each sample and its label with the neighbor in the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_turbo._checks import expect, is_number, is_whole
from lightning_turbo.data.augment.draws import Draws
from lightning_turbo.data.augment.transform import Parts, Transform, per_sample

__all__ = ["CutMix", "MixUp"]


class MixUp(Transform):
    """Mix each image and label with the previous one in the batch: ``lam * x + (1 - lam) * neighbor``.

    ``lam`` is drawn per sample from ``Beta(alpha, alpha)``. The neighbor depends on the order of the batch. Labels
    become probabilities, float32 of shape ``(n, classes)``, which ``cross_entropy`` accepts.

    Args:
        num_classes: Number of classes of integer labels, 2 or more; ``None`` if the labels are probabilities.
        alpha: Parameter of the beta distribution, above 0.
        p: Probability that a sample is changed, from 0 to 1.

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
        """Transform images and labels."""
        # A blended mask would contain classes that do not exist, and a blended image needs a blended label.
        if parts.masks or parts.label is None:
            got = "masks" if parts.masks else "label=None"
            raise ValueError(
                f"MixUp: expected images with a label and no masks, got {got}. Pass label=, or use CutMix."
            )
        share = self._share(draws)
        parts.images = [self.blend(image, share) for image in parts.images]
        parts.label = self.blend(self._probabilities(parts.label), share)

    def _share(self, draws: Draws) -> Tensor:
        """Draw the share that each sample keeps; 1 if it does not change."""
        rows = draws.rows(self.p)
        drawn = draws.beta(self.alpha)
        return torch.ones_like(drawn).index_copy(0, rows, drawn[rows])

    @staticmethod
    def blend(batch: Tensor, share: Tensor) -> Tensor:
        """Return each sample times its share plus its neighbor times the rest."""
        # Unchanged samples keep their bits: 0 times a NaN in the neighbor would be NaN.
        weight = per_sample(share, batch)
        return torch.where(weight == 1, batch, batch * weight + batch.roll(1, 0) * (1 - weight))

    def _probabilities(self, label: Tensor) -> Tensor:
        """Return labels as class probabilities."""
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
    """Replace a box of each image and its masks with that of the previous one in the batch.

    The box has the shape of the image and a share ``1 - lam`` of its volume before clipping to the image; ``lam`` is
    drawn from ``Beta(alpha, alpha)``. Labels are mixed by the replaced share.

    Args:
        num_classes: Number of classes of integer labels, 2 or more; ``None`` without labels or if they are
            probabilities.
        alpha: Of the beta distribution, above 0.
        p: Probability that a sample is changed, from 0 to 1.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if there are neither labels nor masks.

    Source: Yun et al., "CutMix" (2019); torchvision's ``CutMix``.
    """

    def __call__(self, parts: Parts, draws: Draws) -> None:
        """Transform images, masks and labels."""
        if parts.label is None and not parts.masks:
            raise ValueError("CutMix: expected label= or mask=, got neither.")
        axes = len(parts.space)
        share = self._share(draws)
        # The box has the image's aspect ratio, so its edges are roots of the share. It is clipped to the image, and
        # labels are mixed by the share that remains inside.
        half = (1 - share).pow(1 / axes)[:, None] / 2
        center = draws.uniform(0, 1, axes)
        size = torch.tensor(parts.space)
        ends = [((center + sign * half).clamp(0, 1) * size).round().long() for sign in (-1, 1)]
        parts.images = [self.paste(image, *ends) for image in parts.images]
        parts.masks = [self.paste(mask, *ends) for mask in parts.masks]
        if parts.label is not None:
            replaced = ((ends[1] - ends[0]) / size).prod(1)
            parts.label = self.blend(self._probabilities(parts.label), 1 - replaced)

    @staticmethod
    def paste(batch: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Return each sample with the box from ``begin`` to ``end``, ``(n, axes)``, taken from its neighbor."""
        begin, end = (each.to(batch.device, non_blocking=True) for each in (begin, end))
        inside = torch.ones(len(batch), *[1] * (batch.dim() - 1), dtype=torch.bool, device=batch.device)
        for axis in range(2, batch.dim()):
            at = torch.arange(batch.shape[axis], device=batch.device)
            one = (at >= begin[:, axis - 2, None]) & (at < end[:, axis - 2, None])
            inside = inside & one.view(len(batch), *[-1 if each == axis else 1 for each in range(1, batch.dim())])
        return torch.where(inside, batch.roll(1, 0), batch)
