"""Speed techniques for PyTorch Lightning 2, each one line away.

Public names are loaded on first use, so that importing this package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_turbo._lightning import bind_lightning, register_strategies, when_lightning_is_imported

if TYPE_CHECKING:
    from lightning_turbo import amp
    from lightning_turbo.callbacks.drop_bias import DropBiasBeforeNorm
    from lightning_turbo.callbacks.effective_batch_size import EffectiveBatchSize
    from lightning_turbo.callbacks.exact_accumulation import ExactAccumulation
    from lightning_turbo.callbacks.grad_to_none import GradToNone
    from lightning_turbo.callbacks.lr_range import lr_range
    from lightning_turbo.callbacks.memory_format import MemoryFormat
    from lightning_turbo.callbacks.prefetch_next_epoch import PrefetchNextEpoch
    from lightning_turbo.data.dali.loader import DALILoader
    from lightning_turbo.data.device import DevicePrefetcher
    from lightning_turbo.data.loader import PrefetchLoader
    from lightning_turbo.data.normalize import Normalize
    from lightning_turbo.data.packed import PackedDataset
    from lightning_turbo.data.tune_workers import tune_workers
    from lightning_turbo.datamodules.dali import DALIDataModule
    from lightning_turbo.datamodules.prefetch import PrefetchDataModule
    from lightning_turbo.doctor.callback import Doctor
    from lightning_turbo.nn.bias import drop_bias_before_norm
    from lightning_turbo.optim.cyclic import cyclic_lr
    from lightning_turbo.optim.layerwise import lamb, lars
    from lightning_turbo.plugins.apex_amp import ApexAMP
    from lightning_turbo.plugins.checkpoint_io import AmpCheckpointIO, AtomicCheckpointIO
    from lightning_turbo.strategies.turbo import TurboDDPStrategy, TurboStrategy

__version__ = "0.1.0"

__all__ = [
    "AmpCheckpointIO",
    "ApexAMP",
    "AtomicCheckpointIO",
    "DALIDataModule",
    "DALILoader",
    "DevicePrefetcher",
    "Doctor",
    "DropBiasBeforeNorm",
    "EffectiveBatchSize",
    "ExactAccumulation",
    "GradToNone",
    "MemoryFormat",
    "Normalize",
    "PackedDataset",
    "PrefetchDataModule",
    "PrefetchLoader",
    "PrefetchNextEpoch",
    "TurboDDPStrategy",
    "TurboStrategy",
    "amp",
    "bind_lightning",
    "cyclic_lr",
    "drop_bias_before_norm",
    "lamb",
    "lars",
    "lr_range",
    "tune_workers",
]

# Public name -> the module that holds it; a module that is public itself has no attribute of its name.
_HOMES = {
    "AmpCheckpointIO": "lightning_turbo.plugins.checkpoint_io",
    "ApexAMP": "lightning_turbo.plugins.apex_amp",
    "AtomicCheckpointIO": "lightning_turbo.plugins.checkpoint_io",
    "DALIDataModule": "lightning_turbo.datamodules.dali",
    "DALILoader": "lightning_turbo.data.dali.loader",
    "DevicePrefetcher": "lightning_turbo.data.device",
    "Doctor": "lightning_turbo.doctor.callback",
    "DropBiasBeforeNorm": "lightning_turbo.callbacks.drop_bias",
    "EffectiveBatchSize": "lightning_turbo.callbacks.effective_batch_size",
    "ExactAccumulation": "lightning_turbo.callbacks.exact_accumulation",
    "GradToNone": "lightning_turbo.callbacks.grad_to_none",
    "MemoryFormat": "lightning_turbo.callbacks.memory_format",
    "Normalize": "lightning_turbo.data.normalize",
    "PackedDataset": "lightning_turbo.data.packed",
    "PrefetchDataModule": "lightning_turbo.datamodules.prefetch",
    "PrefetchLoader": "lightning_turbo.data.loader",
    "PrefetchNextEpoch": "lightning_turbo.callbacks.prefetch_next_epoch",
    "TurboDDPStrategy": "lightning_turbo.strategies.turbo",
    "TurboStrategy": "lightning_turbo.strategies.turbo",
    "amp": "lightning_turbo.amp",
    "cyclic_lr": "lightning_turbo.optim.cyclic",
    "drop_bias_before_norm": "lightning_turbo.nn.bias",
    "lamb": "lightning_turbo.optim.layerwise",
    "lars": "lightning_turbo.optim.layerwise",
    "lr_range": "lightning_turbo.callbacks.lr_range",
    "tune_workers": "lightning_turbo.data.tune_workers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    value = getattr(module, name, module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _strategy(name: str) -> Any:
    return lambda **settings: getattr(importlib.import_module(__name__), name)(**settings)


# Trainer(strategy="turbo"): the one thing besides definitions that importing this package does.
when_lightning_is_imported(
    lambda: register_strategies({"turbo": _strategy("TurboStrategy"), "turbo_ddp": _strategy("TurboDDPStrategy")})
)
