"""Strategies for Lightning's Trainer, registered under the names ``"turbo"`` and ``"turbo_ddp"``."""

from lightning_turbo.strategies.turbo import TurboDDPStrategy, TurboStrategy

__all__ = ["TurboDDPStrategy", "TurboStrategy"]
