"""Selects the modules that compute in float32 at O2 and O3: those that the user names, and types that need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.loss import _Loss
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_turbo._checks import expect
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.errors import AmpUsageError

__all__ = ["find_kept", "find_left_alone", "has_sparse_gradients", "needs_float32"]

# By package and class name, because the packages may not be installed: modules that compute image coordinates (off by
# whole voxels in half precision), that cast to float32 themselves, or that convolve with a buffer.
_KINDS = {
    ("monai", "DVF2DDF"),
    ("monai", "EMAQuantizer"),
    ("monai", "Warp"),
    ("timm", "BlurPool2d"),
    ("torchvision", "RAFT"),
}


def find_kept(models: Iterable[nn.Module], keep_fp32_modules: Iterable[str | type[nn.Module]]) -> list[nn.Module]:
    """Return the modules that ``keep_fp32_modules`` selects by class or by name in one of the models.

    Raises:
        AmpUsageError: If an entry matches no module.
    """
    named = [pair for model in models for pair in model.named_modules()]
    expected = "a name in model.named_modules(), such as 'net.codebook', or the class of a module there"
    kept: dict[int, nn.Module] = {}
    for entry in keep_fp32_modules:
        found = [module for name, module in named if _is_meant(entry, name, module)]
        expect(found, "keep_fp32_modules", entry, expected, AmpUsageError)
        kept.update((id(module), module) for module in found)
    return list(kept.values())


def _is_meant(entry: Any, name: str, module: nn.Module) -> bool:
    return isinstance(module, entry) if isinstance(entry, type) else name == entry


def needs_float32(module: nn.Module) -> bool:
    """Return whether a module is of a type that is known to fail in half precision.

    These are losses; parametrizations such as ``orthogonal`` (torch's half gradient of it is NaN) and
    ``spectral_norm``; modules under the older ``torch.nn.utils.spectral_norm``, whose hook multiplies a weight with a
    buffer that it writes; instance norms that accumulate statistics; and a few modules of other packages.
    """
    if isinstance(module, _InstanceNorm):
        return module.track_running_stats
    kind = type(module)
    is_known = (kind.__module__.partition(".")[0], kind.__name__) in _KINDS
    has_norm = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return is_known or has_norm or isinstance(module, (_Loss, ParametrizationList))


def has_sparse_gradients(module: nn.Module) -> bool:
    """Return whether the module's weight gets sparse gradients, which a cast does not propagate."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def find_left_alone(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose weights are all half and frozen, for example in a frozen encoder."""
    for module in root.modules():
        weights = [*module.parameters()]
        if weights and all(weight.dtype in HALF_DTYPES and not weight.requires_grad for weight in weights):
            yield module
