"""The meter of a case: a ``Meter`` that also knows what the suite asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_turbo import measure

__all__ = ["Meter"]


class Meter(measure.Meter):
    """Paces a case, and tells it seed and size.

    Args:
        ask: As in ``lightning_turbo.measure.Meter``.
        seed: Seed for data and weights, the same for all cases; already set in torch, numpy and random.
        quick: Whether a small model or little data should do.
        prepared: What the suite's ``prepare`` returned.
        options: The other arguments of ``lightning_turbo.measure.Meter``.
    """

    def __init__(
        self,
        ask: Any,
        *,
        seed: int = 0,
        quick: bool = False,
        prepared: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ask, **options)
        self.seed = seed
        self.quick = quick
        self.prepared = dict(prepared or {})
