"""Precision plugins for Lightning's Trainer."""

from lightning_turbo.plugins.apex_amp import ApexAMP
from lightning_turbo.plugins.checkpoint_io import AtomicCheckpointIO
from lightning_turbo.plugins.real_apex import RealApexAMP

__all__ = ["ApexAMP", "AtomicCheckpointIO", "RealApexAMP"]
