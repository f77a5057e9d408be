"""``Epoch``: one pass over a ``PrefetchLoader``, from ``iter()`` to its end."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_turbo._random import (
    generator_state,
    generators_at,
    generators_in,
    same_random_numbers,
    same_states,
    set_generator_state,
    set_shared_state,
    torch_state,
)
from lightning_turbo.data.loading.ahead import PATIENCE, TURNS, expected_draws
from lightning_turbo.data.loading.order import Digests, Order, drawn
from lightning_turbo.data.loading.prefetcher import PrefetchIterator, Progress, Running, load_item
from lightning_turbo.data.loading.state import goes_on
from lightning_turbo.data.loading.streams import Counted, StreamSnapshots
from lightning_turbo.data.loading.torch_side import end_workers
from lightning_turbo.data.sample_seeds import keyed
from lightning_turbo.errors import TurboWarning

__all__ = ["Epoch", "EpochProgress"]

# Seconds. How long the end of an epoch waits for the next() of a stream, which may have nothing to give for ever.
STREAM_PATIENCE = 1.0


class EpochProgress(Progress):
    """How far an epoch is, and all that a state says of it. The loader keeps this when the iterator is gone.

    Attributes:
        state: The state that the epoch goes on from; ``None`` for a new one.
        start: Where its order began, see ``Order``; empty for a class that keeps a state of its own.
        number: The number of the epoch, from which sample seeds follow.
        digests: Those of the entries that were drawn.
        held: The random generators that the dataset holds, if it is loaded in this process.
        loaded: Batches that were loaded of a stream, also ahead.
        has_found_end: Whether its end was found, also ahead.
        seeds_kept_workers: Whether it has drawn the seed of worker processes that stay for later passes.
    """

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.state: Any = None
        self.start: dict[str, Any] = {}
        self.number = 0
        self.digests = Digests(ahead)
        self.held: list[Any] = []
        self.loaded = 0
        self.has_found_end = False
        self.seeds_kept_workers = False


class Epoch(PrefetchIterator):
    """One pass over a loader, which ``iter(loader)`` returns.

    The order begins at ``iter()``, and the loading at the first ``next()``. torch draws at ``iter()``: a seed for its
    workers and, where there are some, the first indices. This draws the same there, and makes torch's iterator later,
    so that a state may be loaded in between, as Lightning does, and nothing is begun twice. Only a class of loader with
    an ``__iter__`` of its own begins at ``iter()``, because nobody knows what it draws there.

    The caller ends it: at its last batch, by ``close``, or by dropping it. Always: its start and its count are its own,
    whatever other passes there are over the loader; ``progress`` outlives it.

    Args:
        loader: A ``PrefetchLoader``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        transfer = None if loader.transfer is None or loader.transfer.idle else loader.transfer
        on_device = 0 if transfer is None else transfer.prefetch_batches
        progress = EpochProgress(loader.prefetch_batches + loader.drawn_ahead + on_device)
        self._set_up(progress, loader.profile, loader.prefetch_batches, transfer, loader.timeout)
        self._order: Order = loader.make_order()
        self._entries: Iterator[Any] = iter(())
        # torch's generator before and after it drew the workers' seed at iter(). torch draws that once more where its
        # iterator is made, at the first next(), and has to draw the same.
        self._seed: tuple[Any, Any] = (None, None)
        self.source: Any = None  # torch's iterator, or that of the class behind the loader
        self._begin(loader.loaded)
        progress.number = loader.number_pass(loader.loaded)

    # At iter()

    def _begin(self, state: Any) -> None:
        """Begin as torch does at ``iter()``, unless an order goes on that has begun already."""
        loader = self._loader
        self.progress.state = state
        self.progress.start.clear()
        if loader.keeps_state:
            if state is not None:
                loader.load_behind(state)
            with expected_draws():
                self.source = self._make_source()
            self.progress.states.append((0, loader.ask_behind(self.source)))
            return
        if goes_on(state):
            return
        if state is not None:
            self._order.set_own(state["generators"])
            self._order.set_samplers(state["samplers"])
            if state["end_follows"]:
                self._order.draw_end(copy.deepcopy(state["start"]))
        moved = _has_moved(state)
        with generators_at(state["before_order"]) if state is not None and moved else expected_draws():
            if loader.iterates:
                digests, order, start = self.progress.digests, self._order, self.progress.start
                self._order.entries = lambda: digests.pass_on(order.begin(start))
                self.source = self._make_source()
            else:
                self._draw_as_torch(state)
                # Later the generators are elsewhere.
                self._entries = drawn(self._entries, 1) if moved else self._entries

    def _draw_as_torch(self, state: Any) -> None:
        """Draw what torch's iterator draws when it is made."""
        loader, order, start = self._loader, self._order, self.progress.start
        entries = order.begin(start)
        generator = loader.generator or torch.default_generator
        before = after = generator_state(generator)
        if not loader.has_seeded_workers:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            after = generator_state(generator)
            if loader.num_workers:
                first = start["iter"]
                entries = order.begin(start)  # torch begins twice then
                if loader.is_stream:  # what it draws in its workers follows from their seed, which is drawn between
                    start["iter"] = first
            are_seeded = state is not None and state["over"]
            self.progress.seeds_kept_workers = loader.persistent_workers and not are_seeded
            if loader.persistent_workers and are_seeded:
                # Processes that stay were seeded in the run before the stop, and are not seeded again.
                set_generator_state(generator, before)
        loader.has_seeded_workers = loader.persistent_workers
        self._seed = before, after
        self._entries = self.progress.digests.pass_on(entries)
        if loader.num_workers:
            self._entries = drawn(self._entries, loader.drawn_ahead)

    # At the first next()

    def _open(self) -> None:
        super()._open()
        loader, progress = self._loader, self.progress
        state = progress.state if progress.state is not None else loader.loaded
        progress.number = loader.number_pass(state)
        loader.next_number = progress.number + 1
        is_here = not loader.num_workers
        if is_here and not loader.keeps_state and not loader.profile.is_quiet:
            progress.held = generators_in(loader.dataset)
        if state is not progress.state:  # it was loaded after iter()
            self.close_source()
            self._begin(state)
        # Where processes are forked too, which takes this lock before those that are taken inside.
        with TURNS:
            if self.source is None:
                self.source = self._go_on(state) if goes_on(state) else self._make_new()
            batches = Counted(self.source, progress) if loader.is_stream else self.source
            if state is not None and not loader.keeps_state:
                batches = self._with_held(state, batches)
        self._start_loading(batches, is_here)
        if loader.loaded is state:
            loader.loaded = None

    def _with_held(self, state: dict[str, Any], batches: Iterator[Any]) -> Iterator[Any]:
        """Set the generators that the dataset holds, and load a batch that the stopped run had fetched and not used."""
        held = self.progress.held
        _set_held(held, state["held"])
        if state["before_batch"] is None:
            return batches
        with generators_at(state["before_batch"], held):
            return drawn(batches, 1)

    def close(self, because: str = "it was closed") -> None:
        """End this pass, with the thread or the worker processes that it has."""
        super().close(because)
        if self._running is None:
            self.close_source()

    def close_source(self) -> None:
        """End what a class of loader with an ``__iter__`` of its own has begun, for another beginning."""
        end_workers(self.source)
        self.source = None

    def _make_new(self) -> Any:
        """Make torch's iterator for an order that has begun. It draws its seed once more, which is taken back."""
        loader = self._loader
        self._set_entries(self._entries)
        generator = loader.generator or torch.default_generator
        now = generator_state(generator)
        before, after = self._seed
        set_generator_state(generator, before)
        try:
            return self._make_source()
        finally:
            # A stream may draw where it is opened, and goes on from there if nobody has drawn since iter().
            if not (loader.is_stream and same_states([now], [after])):
                set_generator_state(generator, now)

    def _set_entries(self, entries: Iterator[Any], first: int = 0) -> None:
        """Set what torch's iterator is to read: the entries, or with sample seeds the keys of these."""
        loader, number = self._loader, self.progress.number
        if loader.sample_seeds is not None:
            entries = keyed(entries, number, first, loader.batch_sampler is not None)
        self._order.entries = lambda: entries

    def _go_on(self, state: dict[str, Any]) -> Any:
        """Make torch's iterator for an epoch that goes on: its order is drawn again, and what was used is left out."""
        loader, progress, order = self._loader, self.progress, self._order
        progress.consumed = progress.begun = state["consumed"]
        progress.start = copy.deepcopy(state["start"])
        if loader.iterates or loader.is_stream:
            with same_random_numbers():
                return self._run_through(state)
        skip = state["consumed"] - state["from_batch"]
        if state["is_resharded"]:
            entries = iter(loader.shares().rest(state["order"], state["from_sample"])[skip:])
            order.set_own(state["generators"])
        elif progress.start["first"] is None:
            entries = self._begin_undrawn(state)
        else:
            # The numbers for what was used were drawn before the state was taken.
            with same_random_numbers():
                entries = progress.digests.pass_on(order.begin_again(progress.start))
                entries = drawn(entries, max(1, skip + loader.drawn_ahead))
            entries = itertools.islice(entries, skip, None)
            self._check_order(state, skip)
        self._set_entries(entries, state["consumed"])
        loader.has_seeded_workers = loader.persistent_workers
        own = order.own_states()
        try:
            with same_random_numbers():
                return self._make_source()
        finally:
            order.set_own(own)

    def _begin_undrawn(self, state: dict[str, Any]) -> Iterator[Any]:
        """Return the entries of an order that has begun, and of which none is drawn."""
        order = self._order
        with same_random_numbers():
            entries = order.begin_again(self.progress.start)
        order.set_own(state["generators"])
        entries = self.progress.digests.pass_on(entries)
        if state["before_batch"] is None and _has_moved(state):
            with generators_at(state["before_order"]):
                entries = drawn(entries, 1)
        return entries

    def _run_through(self, state: dict[str, Any]) -> Any:
        """Make an iterator that goes on by the stream's own state, or that loads what was used."""
        loader, progress = self._loader, self.progress
        done, own = next(((number, each) for number, each in reversed(state["stream"])), (0, None))
        entries = progress.digests.pass_on(self._order.begin_again(progress.start))
        if own is not None:
            # The first entry sets the generators to those of the beginning, also what the stream holds.
            entries = drawn(entries, 1)
            loader.dataset.load_state_dict(copy.deepcopy(own["stream"]))
            progress.states.append((done, own))
        self._set_entries(entries)
        source = self._make_source()
        if own is not None:
            set_shared_state(own["random"], progress.held)
        for _ in range(state["consumed"] - done):
            # One that raised an error counts as used, and may raise it again.
            with contextlib.suppress(Exception):
                next(source)
        return source

    def _check_order(self, state: dict[str, Any], skip: int) -> None:
        """Warn if the order that was drawn again is another one than was used."""
        here = self.progress.digests.after(skip)
        is_known = state["digest"] is not None and here is not None and state["rank"] == self._loader.shares().rank
        if not is_known or here == state["digest"]:
            return
        sampler = self._order.sampler
        warnings.warn(
            f"{type(getattr(sampler, 'sampler', sampler)).__name__} does not begin again where it began: its order "
            f"differs now in the {skip} batches that were used, so that samples are seen twice in this epoch and "
            "others never. Do not restore its place yourself, and shuffle no list in place: give it state_dict and "
            "load_state_dict, or let its order follow from a seed and set_epoch. Or go on from a checkpoint of the end "
            "of an epoch.",
            TurboWarning,
            stacklevel=6,
        )

    def _make_source(self) -> Any:
        pins = self.transfer is not None and self.transfer.device.type == "cuda"
        return self._loader.make_source(pins)

    def _start_loading(self, batches: Iterator[Any], is_here: bool) -> None:
        loader, progress, source = self._loader, self.progress, self.source
        workers = None if loader.is_kept(source) else source  # that end with this epoch
        running = Running(
            functools.partial(_end, workers, loader.take_pool()), STREAM_PATIENCE if loader.is_stream else PATIENCE
        )
        lock = TURNS if is_here else contextlib.nullcontext()
        load = functools.partial(load_item, batches, lock, self._snapshot(), None)
        self._start_with(
            load,
            running,
            loader.most_ahead() - progress.consumed,
            progress.held,
            may_thread=is_here and loader.sample_seeds is None,
        )

    def _snapshot(self) -> Callable[[], Any] | None:
        loader, progress = self._loader, self.progress
        if loader.keeps_state:
            return functools.partial(loader.ask_behind, self.source)
        if loader.asks_stream:
            return StreamSnapshots(loader.dataset, self.source, progress.held, goes_on(progress.state))
        return None

    def __next__(self) -> Any:
        loader = self._loader
        if loader.asked is not self.progress or loader.passes[-1][1] is not self.progress:
            loader.notice(self)
        return super().__next__()

    def state_dict(self, unused: int = 0) -> Any:
        """Return the loader's state as far as this pass is.

        Args:
            unused: How many batches were returned and not used, as one that a Trainer has fetched ahead; 2 at most.
        """
        return self._loader.describe(self.progress, unused)


def _end(workers: Any, pool: Any) -> None:
    end_workers(workers)
    if pool is not None:
        pool.close()


def _has_moved(state: Any) -> bool:
    """Whether somebody has drawn since a state was taken from which the first entry is still to be drawn.

    If nobody has, the order is drawn as by a plain loader, and the generators go on.
    """
    then = None if state is None else state["before_order"]
    return then is not None and not torch.equal(then["torch"], torch_state())


def _set_held(held: list[Any], states: list[Any]) -> None:
    """Set the generators that the dataset holds to the states of those of a dataset like it."""
    if states and len(held) != len(states):
        warnings.warn(
            f"The state is of a dataset that held {len(states)} random generators, and this one holds {len(held)}: "
            "they stay as they are, and samples may differ from those of a run that was not stopped. Make the "
            "generators in the dataset's __init__.",
            TurboWarning,
            stacklevel=6,
        )
        return
    for generator, state in zip(held, states, strict=False):
        set_generator_state(generator, state)
