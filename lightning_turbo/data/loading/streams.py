"""Where a stream stands, counted in samples, and how a loader with other batches or worker processes goes on there."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

from lightning_turbo.data.loading.resume import Position, used_samples
from lightning_turbo.data.loading.torch_workers import samples_of_stream
from lightning_turbo.data.orders.sharding import refuse
from lightning_turbo.errors import TurboWarning

__all__ = ["adapt", "is_within_epoch", "place_of", "restore", "skip_samples", "state_of"]


def state_of(loader: Any, goes_on: bool = False) -> Callable[[], Any] | None:
    """Return what asks the stream of a loader for its state; ``None`` if no exact one can be had in this process."""
    stream = loader.dataset
    has_state = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
    if loader.num_workers or not has_state or _has_buffer(stream):
        return None

    def ask() -> Any:
        # Hugging Face's streams begin later epochs too at the state that was loaded, unless it is taken back.
        if goes_on and getattr(stream, "_starting_state_dict", None):
            stream.load_state_dict({})
        return copy.deepcopy(stream.state_dict())

    return ask


def _has_buffer(stream: Any) -> bool:
    """Whether a stream of Hugging Face's shuffles in a buffer, whose samples its state leaves out."""
    inside = [getattr(stream, name) for name in ("_ex_iterable", "ex_iterable") if hasattr(stream, name)]
    inside += getattr(stream, "ex_iterables", [])
    return hasattr(stream, "buffer_size") or any(_has_buffer(each) for each in inside)


def is_within_epoch(state: dict[str, Any]) -> bool:
    """Whether a state of a loader over a stream is of an epoch of which a sample was used, and not the last."""
    at = (state.get("samples") or {}).get("at")
    return not state.get("whole") and (state["consumed"] > 0 or at is not None)


def place_of(loader: Any, position: Position) -> dict[str, Any]:
    """Return what the state of a loader over a stream tells of its samples, as ``ResumableOrder.samples`` does."""
    order, own = {"sampler": type(loader.dataset).__name__, "length": None}, position.states
    return {"order": order, **_how(loader), "at": (position.samples or {}).get("at"), "own": own}


def _how(loader: Any) -> dict[str, Any]:
    # No order is dealt out to the ranks: each has a stream. One worker process reads it as this one does: both are 1.
    return {"ranks": None, "batch_size": loader.batch_size or 1, "workers": max(1, loader.num_workers)}


def adapt(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of a loader with other batches or worker processes as one of this loader.

    If worker processes cannot leave out just what was used, a ``TurboWarning`` says it in numbers.
    """
    samples = state.get("samples")
    if samples is None or not is_within_epoch(state):
        return state
    if "workers" not in samples:
        refuse("sampler", samples["order"]["sampler"], f"the stream {type(loader.dataset).__name__}")
    how = _how(loader)
    used, size = used_samples(state), how["batch_size"]
    # Worker processes leave out whole batches, and cannot go on within one.
    is_as_before = {name: samples[name] for name in how} == how
    if is_as_before and (not loader.num_workers or used == state["consumed"] * size):
        return state
    # Where a batch of this size would end in the middle of what is left out, it counts as one that is left.
    at = {"samples": used, "batches": used // size}
    if loader.num_workers or samples["workers"] > 1:
        at["samples"] = used // size * size  # worker processes leave out whole batches only, and each its own
        _warn_of_workers(samples, how, used, at["samples"])
    own = [(at["batches"], each) for count, each in samples["own"] if count == state["consumed"]]
    changed = {**samples, **how, "at": at, "own": own}
    return {**state, "consumed": at["batches"], "length": None, "next_rng": None, "samples": changed}


def _warn_of_workers(before: dict[str, Any], now: dict[str, Any], used: int, left_out: int) -> None:
    alone = before["workers"] == now["workers"] == 1
    if alone and left_out == used:
        return
    seen = f"{used - left_out} are seen twice" if alone else f"up to {used} may be seen twice, and as many never"
    warnings.warn(
        f"{used} samples of the stream were used, in batches of {before['batch_size']} and {before['workers']} worker "
        f"processes, and {left_out} are left out now, in batches of {now['batch_size']} and {now['workers']}: {seen}. "
        "Go on with the same batch_size and num_workers, or from a checkpoint of a whole epoch.",
        TurboWarning,
        stacklevel=4,
    )


def restore(loader: Any, state: dict[str, Any], position: Position) -> int | None:
    """Have a stream go on by its own state, and return the count of batches that it is of; ``None`` without one."""
    own = (state.get("samples") or {}).get("own", [])
    states = [each for each in own if each[0] <= position.consumed]
    if not states or state_of(loader) is None:
        return None
    position.states = states[-1:]
    count, latest = states[-1]
    loader.dataset.load_state_dict(copy.deepcopy(latest))
    return count


def skip_samples(source: Any, state: dict[str, Any]) -> int:
    """Leave out the samples of torch's iterator that were used in other batches, and return how many those count."""
    at = (state.get("samples") or {}).get("at")
    samples = samples_of_stream(source)
    if at is None or samples is None:
        return 0
    next(itertools.islice(samples, at["samples"], at["samples"]), None)
    return at["batches"]
