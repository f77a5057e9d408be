"""Speed techniques for PyTorch Lightning 2, each one line away.

Public names are loaded on first use, so that importing this package stays light.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from lightning_turbo._lightning import register_strategies, when_lightning_is_imported

if TYPE_CHECKING:  # for type checkers, which cannot read PUBLIC; a test compares the two
    from lightning_turbo import amp as amp
    from lightning_turbo._lightning import bind_lightning as bind_lightning
    from lightning_turbo.amp.grad_scaler import ApexGradScaler as ApexGradScaler
    from lightning_turbo.callbacks.augment import AugmentBatches as AugmentBatches
    from lightning_turbo.callbacks.drop_bias import DropBiasBeforeNorm as DropBiasBeforeNorm
    from lightning_turbo.callbacks.effective_batch_size import EffectiveBatchSize as EffectiveBatchSize
    from lightning_turbo.callbacks.exact_accumulation import ExactAccumulation as ExactAccumulation
    from lightning_turbo.callbacks.exact_resume import ExactResume as ExactResume
    from lightning_turbo.callbacks.fused_optimizers import FusedOptimizers as FusedOptimizers
    from lightning_turbo.callbacks.grad_to_none import GradToNone as GradToNone
    from lightning_turbo.callbacks.lr_range import lr_range as lr_range
    from lightning_turbo.callbacks.memory_format import MemoryFormat as MemoryFormat
    from lightning_turbo.callbacks.preemption import Preemption as Preemption
    from lightning_turbo.callbacks.prefetch import Prefetch as Prefetch
    from lightning_turbo.data import augment as augment
    from lightning_turbo.data.dali.loader import DALILoader as DALILoader
    from lightning_turbo.data.loading.device import DevicePrefetcher as DevicePrefetcher
    from lightning_turbo.data.loading.loader import PrefetchLoader as PrefetchLoader
    from lightning_turbo.data.loading.loader import seed_samples as seed_samples
    from lightning_turbo.data.loading.tune_workers import tune_workers as tune_workers
    from lightning_turbo.data.normalize import Normalize as Normalize
    from lightning_turbo.data.orders.length_batch_sampler import LengthBatchSampler as LengthBatchSampler
    from lightning_turbo.data.orders.seeded_sampler import SeededSampler as SeededSampler
    from lightning_turbo.data.orders.weighted_sampler import WeightedSampler as WeightedSampler
    from lightning_turbo.data.packed.packed_dataset import PackedDataset as PackedDataset
    from lightning_turbo.data.packed.patches import PatchDataset as PatchDataset
    from lightning_turbo.datamodules.dali import DALIDataModule as DALIDataModule
    from lightning_turbo.datamodules.prefetch import PrefetchDataModule as PrefetchDataModule
    from lightning_turbo.doctor.callback import Doctor as Doctor
    from lightning_turbo.nn.bias import drop_bias_before_norm as drop_bias_before_norm
    from lightning_turbo.optim.cyclic import cyclic_lr as cyclic_lr
    from lightning_turbo.optim.layerwise import lamb as lamb
    from lightning_turbo.optim.layerwise import lars as lars
    from lightning_turbo.optim.param_groups import merge_param_groups as merge_param_groups
    from lightning_turbo.plugins.apex_amp import ApexAMP as ApexAMP
    from lightning_turbo.plugins.checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
    from lightning_turbo.plugins.real_apex import RealApexAMP as RealApexAMP
    from lightning_turbo.strategies.turbo import TurboStrategy as TurboStrategy
    from lightning_turbo.strategies.turbo_ddp import TurboDDPStrategy as TurboDDPStrategy

__version__ = "0.1.0"

# Section of the documentation -> public name -> module of this package.
PUBLIC = {
    "Precision": {
        "ApexAMP": "plugins.apex_amp",
        "ApexGradScaler": "amp.grad_scaler",
        "RealApexAMP": "plugins.real_apex",
        "AtomicCheckpointIO": "plugins.checkpoint_io",
        "amp": "amp",
    },
    "Data": {
        "Prefetch": "callbacks.prefetch",
        "PrefetchDataModule": "datamodules.prefetch",
        "PrefetchLoader": "data.loading.loader",
        "DevicePrefetcher": "data.loading.device",
        "PackedDataset": "data.packed.packed_dataset",
        "PatchDataset": "data.packed.patches",
        "Normalize": "data.normalize",
        "AugmentBatches": "callbacks.augment",
        "augment": "data.augment",
        "tune_workers": "data.loading.tune_workers",
        "seed_samples": "data.loading.loader",
        "SeededSampler": "data.orders.seeded_sampler",
        "LengthBatchSampler": "data.orders.length_batch_sampler",
        "WeightedSampler": "data.orders.weighted_sampler",
        "DALILoader": "data.dali.loader",
        "DALIDataModule": "datamodules.dali",
    },
    "Around the step": {
        "cyclic_lr": "optim.cyclic",
        "lr_range": "callbacks.lr_range",
        "lamb": "optim.layerwise",
        "lars": "optim.layerwise",
        "merge_param_groups": "optim.param_groups",
        "ExactAccumulation": "callbacks.exact_accumulation",
        "EffectiveBatchSize": "callbacks.effective_batch_size",
        "GradToNone": "callbacks.grad_to_none",
        "MemoryFormat": "callbacks.memory_format",
        "FusedOptimizers": "callbacks.fused_optimizers",
        "drop_bias_before_norm": "nn.bias",
        "DropBiasBeforeNorm": "callbacks.drop_bias",
    },
    "Strategies": {
        "TurboStrategy": "strategies.turbo",
        "TurboDDPStrategy": "strategies.turbo_ddp",
        "ExactResume": "callbacks.exact_resume",
        "Preemption": "callbacks.preemption",
    },
    "Advice": {
        "Doctor": "doctor.callback",
    },
    "Binding": {
        "bind_lightning": "_lightning",
    },
}
_HOMES = {name: home for names in PUBLIC.values() for name, home in names.items()}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


# Modules that hold names from the documentation that this module does not export.
_FURTHER = ("amp", "data", "data.augment", "errors", "nn", "optim")
# Modules of apex that an import with only the package renamed asks for, as ``from apex import amp, optimizers``.
_OF_APEX = ("contrib", "multi_tensor_apply", "normalization", "optimizers", "transformer")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise _unknown(name)
    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    value = getattr(module, name, module)  # amp and augment are modules themselves
    # Cached, so that the next lookup does not call this function.
    globals()[name] = value
    return value


def _unknown(name: str) -> Exception:
    """Return the error for an unknown name. It says where the name lives, or suggests the closest one.

    ``from lightning_turbo import NAME`` first asks for the attribute and then for a submodule of that name, and Python
    drops the message of the ``AttributeError``. So an import of a name that is no submodule either gets an
    ``ImportError``.
    """
    # Tools such as inspect and copy ask every module for names with an underscore.
    is_module = importlib.util.find_spec(f"{__name__}.{name}") is not None
    hint = "" if is_module or name.startswith("_") else _hint(name)
    if not is_module and sys._getframe(2).f_code.co_name == "_handle_fromlist":
        return ImportError(f"cannot import name {name!r} from {__name__!r}{hint}", name=name)
    return AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def _hint(name: str) -> str:
    from lightning_turbo._checks import suggest

    if name in _OF_APEX:
        return f". apex.{name} is not part of this package: docs/migration.md names what to take."
    homes = [home for home in _FURTHER if name in importlib.import_module(f"{__name__}.{home}").__all__]
    return f"; did you mean {__name__}.{homes[0]}.{name}?" if homes else suggest(name, __all__)


def __dir__() -> list[str]:
    own = {name for name, value in globals().items() if getattr(value, "__name__", "") == f"{__name__}.{name}"}
    return sorted({*__all__, *own, *(name for name in globals() if name.startswith("__"))})


def _strategy(name: str) -> Any:
    return lambda **settings: getattr(importlib.import_module(__name__), name)(**settings)


_STRATEGIES = {"turbo": _strategy("TurboStrategy"), "turbo_ddp": _strategy("TurboDDPStrategy")}
# Registers Trainer(strategy="turbo"); importing this package does nothing else.
when_lightning_is_imported(lambda copy: register_strategies(copy, _STRATEGIES))
