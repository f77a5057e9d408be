"""Precision plugins for Lightning's Trainer."""

from lightning_turbo.plugins.apex_amp import ApexAMP
from lightning_turbo.plugins.checkpoint_io import AmpCheckpointIO, AtomicCheckpointIO

__all__ = ["AmpCheckpointIO", "ApexAMP", "AtomicCheckpointIO"]
