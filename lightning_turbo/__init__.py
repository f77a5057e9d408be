"""Speed techniques for PyTorch Lightning 2, each one line away.

Public names are loaded on first use, so that importing this package stays light. Type checkers read them in
``__init__.pyi``, which ``scripts/overview.py`` writes.
"""

from __future__ import annotations

import importlib
from typing import Any

from lightning_turbo._lightning import register_strategies, when_lightning_is_imported

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    value = getattr(module, name, module)  # amp and augment are modules themselves
    # Cached, so that the next lookup does not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = {name for name, value in globals().items() if getattr(value, "__name__", "") == f"{__name__}.{name}"}
    return sorted({*__all__, *own, *(name for name in globals() if name.startswith("__"))})


def _strategy(name: str) -> Any:
    return lambda **settings: getattr(importlib.import_module(__name__), name)(**settings)


_STRATEGIES = {"turbo": _strategy("TurboStrategy"), "turbo_ddp": _strategy("TurboDDPStrategy")}
# Registers Trainer(strategy="turbo"); importing this package does nothing else.
when_lightning_is_imported(lambda copy: register_strategies(copy, _STRATEGIES))
