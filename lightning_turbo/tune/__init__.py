"""``lightning-turbo tune``: what makes a training script faster on this machine, found by measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_turbo.tune.units import FusedOptimizers, LoaderSettings

__all__ = ["FusedOptimizers", "LoaderSettings"]


def __getattr__(name: str) -> Any:
    # A process of tune must not choose a copy of Lightning before the script does.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_turbo.tune import units

    return getattr(units, name)
