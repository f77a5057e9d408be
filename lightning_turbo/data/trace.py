"""States that a loader's class makes of itself, with what it takes to go back from one by some batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from lightning_turbo.data.resume import START, TRACE, Place, has_epoch
from lightning_turbo.data.torch_iterators import copied, count_once, end_workers

__all__ = ["begin_epoch", "begun", "noted", "traced"]

# Batches of the epoch that were handed out; whether the epoch was over, as a Trainer knows; whether its end was handed
# out; states before, by their batches; whether only the last batch of the epoch before is left; what the class leaves
# out: the state of the loader's generator, from which it draws as it begins, and the epochs of samplers that count;
# the epochs of those after the epoch that is over, if they are known.
_TRACE: dict[str, Any] = {
    "consumed": 0, "whole": False, "ended": False, "earlier": {}, "over": False, "generator": None, "epochs": [],
    "next": [],
}  # fmt: skip


def noted(state_dict: Callable[[], Any], loader: Any) -> Any:
    """Return what a class says of itself, and what it leaves out of its loader."""
    state = copied(state_dict)
    drawn = None if loader.generator is None else loader.generator.get_state()
    return {**state, TRACE: {"generator": drawn, "epochs": _epochs(loader)}} if isinstance(state, dict) else state


def traced(state: Any, place: Place | None) -> Any:
    """Return a state with the ones before it, which ``judge_states`` may take in its place.

    Args:
        state: What the class said of itself; whatever is no ``dict`` is returned as it is.
        place: Where its iterator stands, with what was ``noted`` after the latest batches.
    """
    trace = state.get(TRACE, {}) if isinstance(state, dict) else {}
    if place is None or not isinstance(place.state, dict) or "over" in trace:
        return {**state, TRACE: dict(trace)} if trace else state
    earlier = _by_batches(place)
    if not place.ended:
        del earlier[place.consumed]
    return _with_trace(state, **trace, consumed=place.consumed, ended=place.ended, earlier=earlier)


def begun(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that an epoch begins with after a ``traced`` one was loaded."""
    trace = state.get(TRACE, {})
    if trace.get("whole") or trace.get("ended"):
        return _after(state, trace["earlier"], trace["consumed"], trace["ended"])
    return _with_trace(state, **{**trace, "earlier": {}})


def begin_epoch(loader: Any, behind: Any, loaded: dict[str, Any], place: Place | None) -> tuple[Any, Any]:
    """Begin an epoch of a class with a state of its own.

    Args:
        loader: The loader.
        behind: The class, as ``super()``.
        loaded: What ``begun`` returned for a state that was loaded, or ``START``.
        place: Where the iterator before stands, if there is one.

    Returns:
        The iterator, and the state that its epoch begins with, if that is known.
    """
    if loaded is START:
        if place is None or place.untouched or not isinstance(place.state, dict):
            return behind.__iter__(), None
        start = _after(place.state, _by_batches(place), place.consumed, place.ended)
        start[TRACE]["next"] = _epochs(loader)
        return behind.__iter__(), start
    trace, theirs = loaded[TRACE], {name: value for name, value in loaded.items() if name != TRACE}
    after = trace["next"] or _epochs(loader)
    _set_epochs(loader, trace["epochs"])  # whoever counts them may not have told it yet
    if theirs:
        behind.load_state_dict(theirs)
    source = behind.__iter__()
    count_once(source, theirs)
    if trace["generator"] is not None and loader.generator is not None:
        loader.generator.set_state(trace["generator"])
    if trace["over"]:
        next(source, None)
        if not loader.persistent_workers:
            end_workers(source)
        _set_epochs(loader, after)
        source, loaded = behind.__iter__(), {**loaded, TRACE: {**trace, "next": after}}
    return source, loaded


def _by_batches(place: Place) -> dict[int, Any]:
    return dict(zip(itertools.count(place.consumed, -1), reversed(place.states)))


def _after(state: dict[str, Any], earlier: dict[int, Any], consumed: int, ended: bool) -> dict[str, Any]:
    """Return what an epoch begins with after one that was over.

    Only who has run to the end of an epoch begins the next as it would have. So that is the state from which a single
    ``next`` leads there: to the last batch, or to the end if that was handed out.
    """
    before = earlier.get(consumed - (not ended))
    if before is None or before[TRACE].get("over"):  # that one is of the epoch before
        before = state
    return _with_trace(before, over=True, **{name: before[TRACE][name] for name in ("generator", "epochs")})


def _epochs(loader: Any) -> list[int]:
    return [sampler.epoch for sampler in _counting(loader)]


def _set_epochs(loader: Any, epochs: list[int]) -> None:
    for sampler, epoch in zip(_counting(loader), epochs, strict=False):
        sampler.set_epoch(epoch)


def _counting(loader: Any) -> list[Any]:
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [sampler for sampler in {id(each): each for each in samplers}.values() if has_epoch(sampler)]


def _with_trace(state: dict[str, Any], **known: Any) -> dict[str, Any]:
    return {**state, TRACE: {**_TRACE, **known}}
