"""The rule about several ranks: which rank waits for which."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.ranks import Slow, find_slow
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__: list[str] = []

NAMES = {
    "data": "loading",
    "copy": "the copy to the device",
    "forward": "training_step",
    "backward": "backward, where gradients are reduced",
    "optimizer": "the optimizer's step",
    "loop": "Lightning's loop",
}
MANY = 10
"""From this factor on, the difference in seconds is more informative."""


@rule(
    "slow-rank",
    "doctor",
    "Give each rank the same work here, or look at what else its machine does: all ranks are as fast as the slowest.",
    by_time=True,
)
def _slow_rank(facts: Facts) -> Iterator[Hit]:
    for slow in find_slow(facts.ranks):
        own = facts.ranks[slow.rank]
        doing = own.hook if slow.place == "hooks" else NAMES.get(slow.place, slow.place)
        times = f"{slow.factor:.1f} times as long as" if slow.factor < MANY else f"{_time(slow)} longer than"
        what = f"rank {slow.rank} takes {times} the others: {doing}"
        # A single event costs seconds of a whole run; one in each step costs a share of the run.
        level = "info" if slow.once else "warning"
        yield Hit(what, own.sites.get(slow.place), _cost(slow, len(facts.ranks)), level, seconds=slow.waited)


def _time(slow: Slow) -> str:
    return f"{slow.seconds * 1e3:.0f} ms a step" if not slow.once else f"{slow.seconds:.1f} s"


def _cost(slow: Slow, ranks: int) -> str:
    who = f"rank {1 - slow.rank} waits" if ranks == 2 else "the others wait"
    if slow.once:
        return f"{who} {slow.waited:.1f} s (measured)"
    low, high = slow.interval
    where = f"{slow.waited * 1e3:.0f} ms a step in {NAMES.get(slow.at, slow.at)}"
    return f"{who} {where} (measured; the difference is {low * 1e3:.0f} to {high * 1e3:.0f} ms, 95 %)"
