"""Demo: one small network on real data, trained at O0, O1, O2 and O3 by an ordinary Trainer."""

from lightning_turbo.demo.settings import DemoError, DemoSettings

__all__ = ["DemoError", "DemoSettings"]
