"""``lightning-turbo tune``: what makes a training script faster on this machine, found by measurement."""

from lightning_turbo.tune.units import FusedOptimizers, LoaderSettings

__all__ = ["FusedOptimizers", "LoaderSettings"]
