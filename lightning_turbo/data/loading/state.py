"""The state of a ``PrefetchLoader``: what it says of a pass, and what another loader makes of it."""

from __future__ import annotations

import warnings
from typing import Any

from lightning_turbo._random import generator_state, generators_in, shared_state
from lightning_turbo.data.loading.shares import used_samples
from lightning_turbo.data.loading.streams import has_exact_state
from lightning_turbo.errors import TurboWarning

__all__ = [
    "VERSION", "check_version", "goes_on", "is_counted", "reshard", "state_of", "state_of_new", "warn_of_last_pass",
]  # fmt: skip

VERSION = 5
# A dictionary of plain Python objects and tensors, which loads with ``weights_only=True``. Of a loader that has not
# begun it is this, and these are its fields:
# consumed      batches of the epoch that were used
# length        batches of the whole epoch; None if the loader has none
# over          whether the epoch is over, so that the next pass begins the one after it
# epoch         its number, from which sample seeds follow
# start         where its order began, see Order; empty before iter()
# before_order  in a state before the first entry, the global RNGs from which it will be drawn
# generators    the states of the generators that the loader and its samplers hold, as the next iter() finds them
# samplers      the states of its samplers that have one, likewise
# end_follows   whether all batches were used and the end was not asked for yet, at which torch's samplers draw once
#               more: the pass that goes on from here draws that first. A Trainer never asks for it
# held          those that the dataset holds, in this process
# digest        of the entries that were used; None if it is not known
# rank          the rank whose entries these are
# before_batch  the random states before the next batch, if that was loaded already when the state was taken
# stream        a stream's own state, in a list with the number of batches before it
# order         what the order of all samples over all ranks follows from; None if that is not known
# ranks, batch_size, workers                  of the loader
# is_resharded, from_sample, from_batch       whether the epoch goes on with other ranks or batches, from which sample
#                                             on, and as how many batches those before it count
_NEW: dict[str, Any] = {
    "version": VERSION, "consumed": 0, "length": None, "over": False, "epoch": 0, "start": {}, "before_order": None,
    "generators": [], "samplers": [], "end_follows": False, "held": [], "digest": None, "before_batch": None,
    "stream": [], "order": None, "rank": 0, "ranks": 1, "batch_size": 1,
    "workers": 0, "is_resharded": False, "from_sample": 0, "from_batch": 0,
}  # fmt: skip


def is_counted(state: Any) -> bool:
    """Whether a loader's state is one that counts batches, of any version, and not that of a class of its own."""
    return isinstance(state, dict) and "version" in state and "consumed" in state


def check_version(state: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if a state is of another version."""
    if state["version"] != VERSION:
        raise ValueError(
            f"expected a loader's state of version {VERSION}, got {state['version']}, of another snapshot of this "
            "package. Go on with the snapshot that wrote it, or from the weights alone."
        )


def goes_on(state: Any) -> bool:
    """Whether a state is one within an epoch that has begun."""
    return state is not None and "start" in state and bool(state["start"]) and not state["over"]


def state_of_new(loader: Any) -> dict[str, Any]:
    """Return the state of a loader that was not iterated."""
    order = loader.make_order()
    held = [] if loader.num_workers else generators_in(loader.dataset)
    return {
        **_NEW,
        "generators": order.own_states(),
        "samplers": order.sampler_states(),
        "held": list(map(generator_state, held)),
        "epoch": loader.next_number,
        "before_order": shared_state(),
    }


def state_of(loader: Any, progress: Any, consumed: int, unused: int) -> dict[str, Any]:
    """Return the state of a pass over a loader.

    Args:
        loader: The loader.
        progress: The progress of the pass.
        consumed: How many batches of the epoch were used.
        unused: How many were returned after these.
    """
    over = not unused and loader.is_over(progress)
    state = {
        **_NEW,
        "consumed": consumed,
        "length": loader.length(),
        "over": over,
        "epoch": progress.number,
        "held": _held_states(progress, unused),
        "before_batch": progress.before_latest if unused == 1 else None,
        "workers": loader.num_workers,
        "stream": [each for each in progress.states if each[0] <= consumed][-1:] if loader.asks_stream else [],
        **_describe_order(loader, progress, consumed, is_first_again=bool(unused) and not consumed),
    }
    if not over:
        _warn_of_lost_states(loader)
    return state


def _held_states(progress: Any, unused: int) -> list[Any]:
    """Return the states of the generators that the dataset holds, before the first of the unused batches."""
    if unused > 1:
        return []  # those before the first of two are not known
    if progress.is_untouched and progress.state is not None:
        return progress.state["held"]  # they are set at the first batch
    return list(map(generator_state, progress.held))


def _describe_order(loader: Any, progress: Any, consumed: int, *, is_first_again: bool) -> dict[str, Any]:
    """Return what a state says of the order of a pass.

    Args:
        loader: The loader.
        progress: The progress of the pass.
        consumed: How many batches of the epoch were used.
        is_first_again: Whether the first batch is loaded again, with which the order was drawn.
    """
    order, start = loader.make_order(), progress.start
    described = {"generators": order.own_states(), "samplers": order.sampler_states(), "start": start}
    if is_first_again and progress.before_latest is not None:
        described.update(generators=start["first"]["own"], start={**start, "first": None})
    elif start and start["first"] is None:
        described["before_order"] = shared_state()
    before = progress.state if goes_on(progress.state) else _NEW
    described.update({name: before[name] for name in ("is_resharded", "from_sample", "from_batch")})
    if not before["is_resharded"]:
        described["digest"] = progress.digests.after(consumed)
    return described | _describe_shares(loader, described["start"], before)


def _describe_shares(loader: Any, start: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return what a state says of the order over all ranks, and how it is shared.

    Args:
        loader: The loader.
        start: Where the order began.
        before: The state that the epoch goes on from, or that of a new loader.
    """
    if loader.is_stream:
        return {"batch_size": loader.batch_size or 1}
    shares = loader.shares()
    known = before["order"]
    if not before["is_resharded"] and start and start["first"] is not None:
        known = shares.describe(start)
    return {"order": known, "ranks": shares.ranks, "rank": shares.rank, "batch_size": shares.batch_size}


def _warn_of_lost_states(loader: Any) -> None:
    """Warn of what worker processes know and do not tell."""
    if not loader.num_workers or loader.sample_seeds is not None:
        return
    name = type(loader.dataset).__name__
    why = ""
    if loader.is_stream and has_exact_state(loader.dataset):
        why = (
            f"{name} has a state_dict, which its worker processes are not asked for: a run that goes on within an "
            "epoch runs through it. With torchdata's StatefulDataLoader it goes on at once."
        )
    elif not loader.is_stream and generators_in(loader.dataset):
        why = (
            f"{name} holds a random generator, of which each worker process has its own, whose state is not part "
            "of the loader's state: what is drawn from it is not the same in a run that goes on from here. Pass "
            "sample_seeds=0, with which random numbers follow from the sample."
        )
    if why:
        warnings.warn(why, TurboWarning, stacklevel=4)


def reshard(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of a loader with other ranks or batches as one of this loader, as far as it goes.

    Warn if the number of batches does not determine which samples were used.
    """
    if state["over"] or not state["start"]:
        return state
    if loader.num_workers and not getattr(loader, "in_order", True):
        why = "in_order=False returns batches as they are ready. Leave in_order=False out to go on exactly."
        _warn_of_unknown(state, why)
    # A class with an __iter__ of its own may make other batches of the entries.
    shares = None if loader.is_stream or loader.iterates else loader.shares()
    if shares is not None and state["order"] is not None:
        shares.check(state["order"])
        if shares.has_same(state):
            return state
        if not used_samples(state):
            return {**_NEW, "over": True, "epoch": state["epoch"] - 1}  # as if it had not begun
        resharded = shares.reshard(state)
        start = {**state["start"], "epochs": [state["order"]["epoch"]] * loader.make_order().count}
        return {**resharded, "start": start}
    _warn_of_other_batches(loader, state)
    return state


def _warn_of_other_batches(loader: Any, state: dict[str, Any]) -> None:
    """Warn if this loader has other batches than the one that was stopped."""
    before, now, size = state["length"], loader.length(), loader.batch_size or 1
    has_other_workers = loader.is_stream and state["workers"] != loader.num_workers
    if before != now or state["batch_size"] != size or has_other_workers:
        _warn_of_unknown(
            state,
            f"The loader had {before} batches of {state['batch_size']} then with num_workers={state['workers']}, and "
            f"has {'no length' if now is None else now} of {size} now with num_workers={loader.num_workers}. Go on "
            "with the same, or from a checkpoint of a whole epoch.",
        )


def _warn_of_unknown(state: dict[str, Any], why: str) -> None:
    """Warn that it is not known which samples were used, if any were."""
    if state["consumed"]:
        warnings.warn(
            f"The state says that {state['consumed']} batches of this epoch were used, but not which ones: samples "
            f"may be missing or repeated. {why}",
            TurboWarning,
            stacklevel=5,
        )


def warn_of_last_pass(left_out: int) -> None:
    """Warn of batches of a pass that is over, which no state of the pass after it can give again."""
    warnings.warn(
        f"A loader began again within the epoch, after batches that were fetched and not used: the last {left_out} of "
        "its pass before are left out. Save after a step and not within one, or give the loaders a length.",
        TurboWarning,
        stacklevel=3,
    )
