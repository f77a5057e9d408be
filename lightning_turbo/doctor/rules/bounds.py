"""Rules about what bounds the step; every verdict except waiting for data has its finding here."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import BOUNDS, NOTICEABLE, WAITING, Facts
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__: list[str] = []

TURBO = {"SingleDeviceStrategy": "turbo", "DDPStrategy": "turbo_ddp"}
"""The strategy that can replace another one."""
COMPILES = {
    **dict.fromkeys(("SingleDeviceStrategy", "TurboStrategy"), "TurboStrategy"),
    **dict.fromkeys(("DDPStrategy", "TurboDDPStrategy"), "TurboDDPStrategy"),
}
"""A strategy, and the one that compiles the network in its place."""


def _hit(facts: Facts, bound: str, what: str, level: str, remedy: str) -> Hit:
    seconds = facts.seconds_in(BOUNDS[bound]) - (facts.own if bound == "compute" else 0.0)
    share = seconds / facts.step
    # Not with ``format``, because names of hooks may contain braces.
    said = what.replace("{share}", f"{share:.0%}")
    return Hit(said, None, "{ms} ms a step (measured)", level, seconds=seconds, remedy=remedy)


def _level(facts: Facts, bound: str) -> str:
    return "warning" if facts.typical_in(BOUNDS[bound]) > NOTICEABLE else "info"


@rule("compute-bound", "tune", "lightning-turbo tune SCRIPT measures which settings help.")
def _compute_bound(facts: Facts) -> Iterator[Hit]:
    if facts.bound != "compute":
        return
    # What may help is guessed from the settings; tune measures it.
    remedies = []
    if facts.run.precision.startswith("32"):
        where = "" if facts.cuda else ", on a CPU with instructions for bfloat16,"
        remedies.append(f"ApexAMP('O1') or ApexAMP('O2'){where} computes in half precision.")
    if facts.convolutions:
        remedies.append("MemoryFormat('channels_last') may speed up convolutions.")
    if name := COMPILES.get(facts.run.strategy):
        remedies.append(f"{name}(compile='blocks') compiles the network.")
    remedies.append("lightning-turbo tune SCRIPT measures which of them help.")
    besides = " besides the lines named here" if facts.own else ""
    what = f"{{share}} of the step is forward, backward and optimizer{besides}"
    yield _hit(facts, "compute", what, "info", " ".join(remedies))


@rule(
    "copy-bound",
    "device-prefetch",
    "DataLoader(pin_memory=True) and strategy='turbo', or DevicePrefetcher in a plain loop, copy the next batch during "
    "the step. Load uint8 and let Normalize scale it on the device.",
    by_time=True,
)
def _copy_bound(facts: Facts) -> Iterator[Hit]:
    if facts.bound == "copy":
        hooks = (
            "" if facts.cuda else "Nothing is copied on a CPU: do the work of the hooks around the copy in the loader."
        )
        yield _hit(facts, "copy", "{share} of the step is the copy of the batch", _level(facts, "copy"), hooks)


@rule("loop-overhead", "turbo-strategy", "Do the work of hooks and callbacks every so many steps only.", by_time=True)
def _loop_overhead(facts: Facts) -> Iterator[Hit]:
    # A step that waits for data may also suffer from the loop; then both are reported.
    if facts.bound != "loop" and not facts.pays_for_loop:
        return
    what = "{share} of the step is hooks, callbacks and logging"
    least = WAITING * facts.seconds_in(BOUNDS["loop"])
    for hook in [each for each in facts.fit.hooks if each.in_steps and each.seconds > least][:1]:
        what += f", the longest of them {hook.shown} ({hook.seconds * 1e3:.2f} ms)"
    turbo = TURBO.get(facts.run.strategy) if facts.pays_for_loop else None
    lean = f"Trainer(strategy={turbo!r}) calls hooks directly and logs without waiting. " if turbo else ""
    rare = "Do the work of your own hooks and callbacks every so many steps only, and log less often."
    yield _hit(facts, "loop", what, _level(facts, "loop"), lean + rare)
