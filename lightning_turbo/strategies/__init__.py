"""Strategies for Lightning's Trainer, registered as ``"turbo"`` and ``"turbo_ddp"``."""

from lightning_turbo.strategies.turbo import TurboStrategy
from lightning_turbo.strategies.turbo_ddp import TurboDDPStrategy

__all__ = ["TurboDDPStrategy", "TurboStrategy"]
