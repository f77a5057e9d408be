"""Demo: the levels O0 to O3 on digits, then stock Lightning beside what ``tune`` found on compressed volumes."""

from lightning_turbo.demo.settings import DemoError, DemoSettings

__all__ = ["DemoError", "DemoSettings"]
