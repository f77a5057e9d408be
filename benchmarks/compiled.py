"""The suite ``compiled``: a step of compiled networks, in a plain loop and under the turbo strategy."""

from __future__ import annotations

from typing import Any

from benchmarks.overhead import TIMES, lightning, plain
from benchmarks.suite import Aim, Suite

__all__ = ["SUITE"]

SUITE = Suite(
    "compiled",
    "A step of compiled networks: the toy network of the suite overhead, and the demo's for digits and volumes.",
    **TIMES,
)


def _register() -> None:
    for task in ("toy", "digits", "volumes"):
        loop, turbo, first = f"plain loop, {task}", f"strategy turbo, {task}", task == "toy"
        demo: dict[str, Any] = {} if first else {"demo": task}
        compiled = {"turbo": {"compile": "network"}, **demo}
        SUITE.add(loop, plain, config={"compiled": True, **demo}, base=loop, baseline=first, quick=first)
        SUITE.add(turbo, lightning, config=compiled, base=loop, ours=True, quick=first)
        SUITE.aims.append(Aim(turbo, loop, 1.05))


_register()
