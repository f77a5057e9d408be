"""Which modules compute in float32 at O2 and O3: those that the user names, and kinds that are known to need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.loss import _Loss
from torch.nn.utils.parametrize import ParametrizationList

from lightning_turbo._checks import expect
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.errors import AmpUsageError

__all__ = ["find_kept", "find_left_alone", "has_sparse_gradients", "needs_float32"]

# By package and class, because none of the packages has to be installed: what computes with positions in an image,
# which in half precision err by whole voxels; what casts to float32 itself; and what convolves with a buffer.
_KINDS = {
    ("monai", "DVF2DDF"),
    ("monai", "EMAQuantizer"),
    ("monai", "Warp"),
    ("timm", "BlurPool2d"),
    ("torchvision", "RAFT"),
}


def find_kept(models: Iterable[nn.Module], keep_fp32_modules: Iterable[str | type[nn.Module]]) -> list[nn.Module]:
    """Return the modules that ``keep_fp32_modules`` names, by class or by their name in one of the models.

    Raises:
        AmpUsageError: If no module has that name or class.
    """
    named = [pair for model in models for pair in model.named_modules()]
    expected = "a name from model.named_modules(), as 'net.codebook', or a class of a module there"
    kept: dict[nn.Module, None] = {}
    for entry in keep_fp32_modules:
        found = [module for name, module in named if _is_meant(entry, name, module)]
        expect(found, "keep_fp32_modules", entry, expected, AmpUsageError)
        kept.update(dict.fromkeys(found))
    return list(kept)


def _is_meant(entry: Any, name: str, module: nn.Module) -> bool:
    return isinstance(module, entry) if isinstance(entry, type) else name == entry


def needs_float32(module: nn.Module) -> bool:
    """Tell whether a module is of a kind that is known to go wrong in half precision.

    These are losses; what makes a weight from others, as ``orthogonal`` (torch's half gradient of it is NaN) and
    ``spectral_norm``; instance norms without weights whose statistics add up; and a few modules of other packages.
    """
    if isinstance(module, _InstanceNorm):
        return module.track_running_stats and not module.affine  # one with weights is found by its first call
    kind = type(module)
    is_known = (kind.__module__.partition(".")[0], kind.__name__) in _KINDS
    return is_known or isinstance(module, (_Loss, ParametrizationList))


def has_sparse_gradients(module: nn.Module) -> bool:
    """Tell whether the weight gets sparse gradients, which a cast cannot pass on."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def find_left_alone(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose weights are all half already and do not train, as of a frozen encoder."""
    for module in root.modules():
        weights = [*module.parameters()]
        if weights and all(weight.dtype in HALF_DTYPES and not weight.requires_grad for weight in weights):
            yield module
