"""Where the time of what was seen of a fit went: sums over its timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from lightning_turbo.doctor.facts import Facts, FitFacts, HookTime, LineTime, Site
from lightning_turbo.doctor.timeline import Mark, Timeline, hooks_of, parts_of

__all__ = ["fit_facts"]

SHORTEST = 1e-3
"""Hooks that take fewer seconds of what was seen are not named."""


def fit_facts(
    timeline: Timeline,
    marks: Sequence[Mark],
    steps: Sequence[dict[tuple[str, str], float]],
    step: float,
    lines: tuple[LineTime, ...],
    find_site: Callable[[str], Site | None],
) -> FitFacts:
    """Return the times of the first epoch if it was seen whole, otherwise of all that was seen.

    Args:
        timeline: The timeline, for its counts of at least one epoch.
        marks: Its marks.
        steps: The seconds of each hook and phase in each timed step.
        step: The seconds of the mean timed step; 0 if none was timed.
        lines: The lines, which may name the place of a hook.
        find_site: Returns the first line of a hook.
    """
    first = timeline.epochs[0]
    seen = timeline.epochs[:1] if first.ended else timeline.epochs
    batches = sum(each.steps for each in seen)
    parts = _parts(timeline, marks, len(seen))
    # Watched steps take longer than others.
    parts["steps"] = batches * (step or parts.get("steps", 0.0) / max(batches, 1))
    return FitFacts(
        parts=parts,
        is_epoch=first.ended,
        batches=batches,
        validations=sum(each.validations for each in seen),
        validated=sum(each.validated for each in seen),
        saves=sum(each.saves for each in seen),
        hooks=(*_hooks_in_steps(steps, batches, lines, find_site), *_hooks_between(marks, lines, find_site)),
    )


def _parts(timeline: Timeline, marks: Sequence[Mark], epochs: int) -> dict[str, float]:
    """Return the seconds of each part in the first epochs."""
    sums = parts_of(marks)

    def part(name: str, *of: int) -> float:
        return sum(sums.get((epoch, name), 0.0) for epoch in of)

    found = {name: part(name, *range(1, epochs + 1)) for _, name in sums}
    found["set-up"] = part("set-up", 0)
    # The second epoch begins as all later ones do.
    if timeline.epochs[0].ended:
        found["first batch"] = part("first batch", *((2,) if timeline.has_border else (0, 1)))
    return found


def _hooks_in_steps(
    steps: Sequence[dict[tuple[str, str], float]],
    batches: int,
    lines: tuple[LineTime, ...],
    find_site: Callable[[str], Site | None],
) -> list[HookTime]:
    """Return the hooks of steps, by the median of the timed steps, slowest first."""
    names = {hook for step in steps for hook, phase in step if phase == "hooks" and _is_named(hook)}
    seconds = {hook: median(step.get((hook, "hooks"), 0.0) for step in steps) for hook in names}
    return [
        HookTime(name=hook, seconds=spent, in_steps=True, site=_site(lines, spent, "steps", hook) or find_site(hook))
        for hook, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if spent * batches > SHORTEST
    ]


def _hooks_between(
    marks: Sequence[Mark], lines: tuple[LineTime, ...], find_site: Callable[[str], Site | None]
) -> list[HookTime]:
    """Return the hooks at the borders of the first epoch, slowest first."""
    sums = hooks_of(marks, "hooks")
    return [
        HookTime(name=hook, seconds=spent, site=_site(lines, spent, "hooks", hook) or find_site(hook))
        for (epoch, hook), spent in sorted(sums.items(), key=lambda item: -item[1])
        if epoch == 1 and spent > SHORTEST and _is_named(hook)
    ]


def _is_named(hook: str) -> bool:
    return hook.startswith("[") and not hook.startswith("[Callback]Doctor.")


def _site(lines: tuple[LineTime, ...], seconds: float, part: str, hook: str) -> Site | None:
    return Facts(lines=lines).line_in(seconds, part, hook)
