"""``PrefetchLoader``, the DataLoader that keeps some batches ahead."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo.data.background import BackgroundIterator, check_count, check_threads
from lightning_turbo.data.randomness import LoadWatch
from lightning_turbo.data.resume import START, TRACE, IndexTape, Place, foreign, length_of, warn_of_gaps
from lightning_turbo.data.torch_iterators import end_workers, guarded, leave, load, undivided
from lightning_turbo.data.trace import begin_epoch, begun, noted, traced
from lightning_turbo.errors import NoEffectWarning

__all__ = ["PrefetchLoader", "prefetching"]

DEPTH = 8


class PrefetchLoader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` whose next batches are prepared in a background thread.

    Takes the arguments of ``DataLoader`` and is one in every respect; the batches and their order are the same, bit
    for bit. To add prefetching to another kind of loader, inherit this class in front of it
    (``class Mine(PrefetchLoader, StatefulDataLoader)``), or call ``PrefetchLoader.of(loader)``.

    The thread and the worker processes end when the iterator is exhausted, dropped, closed, or followed by a second
    ``iter()`` (an earlier iterator that is still in use then goes on with a new thread; with persistent workers it
    cannot), and when the interpreter ends.

    Args:
        *args: As in ``DataLoader``.
        prefetch_batches: How many batches to keep ready, 1 or more; one more is in preparation. The default of 8
            serves loads of uneven duration; less saves memory.
        prefetch_threads: How many threads load at the same time, 1 or more, where there are no worker processes; each
            works on a batch of its own, and the batches keep their order. For loads that wait, or compute outside the
            GIL, and a dataset whose ``__getitem__`` may be called by several threads at once.
        transfer: What moves the batches to a device as they are handed out; see ``DevicePrefetcher``.
        **kwargs: As in ``DataLoader``.

    Raises:
        TypeError: If ``prefetch_batches`` or ``prefetch_threads`` is no integer.
        ValueError: If ``prefetch_batches`` or ``prefetch_threads`` is below 1.

    Warns:
        NoEffectWarning: If loading draws from the process-wide random generators; batches are then loaded in the
            asking thread, because no seed would fix the result otherwise. If ``prefetch_threads`` cannot be used:
            with worker processes, an ``IterableDataset``, a class behind this one that loads by itself, or a dataset
            that draws from generators of its own; one thread then works ahead.

    Example:
        >>> loader = PrefetchLoader(range(6), batch_size=3)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(
        self,
        *args: Any,
        prefetch_batches: int = DEPTH,
        prefetch_threads: int = 1,
        transfer: Any = None,
        **kwargs: Any,
    ) -> None:
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.prefetch_threads = check_threads("prefetch_threads", prefetch_threads)
        self.transfer = transfer
        self._begin_prefetching()
        super().__init__(*args, **kwargs)

    def _begin_prefetching(self) -> None:
        self._prefetch_live: weakref.ref[Any] | None = None
        self._prefetch_work: Any = None
        self._prefetch_next: Any = None
        self._prefetch_place: Place | None = None
        self._prefetch_watch = LoadWatch()
        self._prefetch_tape: IndexTape | None = None
        self._prefetch_resume: dict[str, Any] | None = None
        self._prefetch_wanted: Callable[[], Any] | None = None

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        *,
        prefetch_batches: int = DEPTH,
        prefetch_threads: int = 1,
        transfer: Any = None,
    ) -> PrefetchLoader:
        """Return a loader like ``loader``, of a class that inherits from its class, with prefetching added.

        Dataset, samplers and every attribute are shared; ``loader`` itself is not changed.

        Args:
            loader: A ``DataLoader`` of any class.
            prefetch_batches: How many batches to keep ready, 1 or more.
            prefetch_threads: How many threads load at the same time, 1 or more.
            transfer: What moves the batches to a device as they are handed out.

        Raises:
            TypeError: If ``loader`` is no ``DataLoader``.
        """
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"PrefetchLoader.of got {loader!r}; it takes a torch.utils.data.DataLoader. "
                "For other iterables use DevicePrefetcher or BackgroundIterator."
            )
        twin: Any = copy.copy(loader)
        object.__setattr__(twin, "__class__", prefetching(type(loader)))
        for name, value in vars(twin).items():
            if isinstance(value, list) and name.startswith("__"):  # records that a trainer keeps of this loader
                vars(twin)[name] = list(value)
        vars(twin)["_iterator"] = None
        twin._begin_prefetching()
        twin.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        twin.prefetch_threads = check_threads("prefetch_threads", prefetch_threads)
        twin.transfer = transfer
        return twin

    @property
    def _index_sampler(self) -> Any:
        """The sampler whose indices are loaded, with a tape around it that can skip what was consumed before."""
        sampler: Any = super()._index_sampler
        if self._stateful or isinstance(self.dataset, IterableDataset):
            return sampler
        if self._prefetch_tape is None or self._prefetch_tape.sampler is not sampler:
            self._prefetch_tape = IndexTape(sampler, self.generator)
        return self._prefetch_tape

    @property
    def rewinds(self) -> bool:
        """Whether a second ``iter()`` goes on from a loaded state too; not with a stream that keeps its own state."""
        return not (self._stateful and isinstance(self.dataset, IterableDataset))

    @property
    def _stateful(self) -> bool:
        """Whether the class behind keeps its own state, as torchdata's ``StatefulDataLoader`` does."""
        return hasattr(super(), "state_dict")

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._prefetch_next is not None and self.persistent_workers and self._iterator is None:
            self.load_state_dict(self.state_dict())  # somebody else ended its workers
        if self._prefetch_next is not None:
            started = self._prefetch_next
            vars(self)["_prefetch_next"] = None
            return started
        self._retire()
        resume = self._prefetch_resume = self._resume()
        behind, count, start = cast(Any, super()), resume.get(TRACE, resume), None
        done = skip = 0 if count.get("whole") else count["consumed"]
        sampler = self._index_sampler
        tape = sampler if isinstance(sampler, IndexTape) else None
        if tape is not None:
            # A class behind with an __iter__ of its own may hand out a batch twice, or leave one out.
            skip = 0 if getattr(super().__iter__, "__func__", None) is DataLoader.__iter__ else done
            tape.rewind(resume, done - skip, seeded=self.persistent_workers)
        if self._stateful:
            source, start = begin_epoch(self, behind, resume, self._prefetch_place)
            snapshot = functools.partial(noted, getattr(source, "state_dict", behind.state_dict), self)
            skip = 0
            start = snapshot() if start is None and hasattr(source, "state_dict") else start
        else:
            source, snapshot = behind.__iter__(), tape.note if tape is not None and tape.own else None
        source = guarded(source)
        place, threads, items, stage = Place(done, start), 1, source, None
        if self.prefetch_threads > 1 and self._divisible(source):
            threads, items, stage = self.prefetch_threads, source._sampler_iter, functools.partial(load, source)
            self._prefetch_watch.owners = (self.dataset, self.collate_fn)
        self._prefetch_watch.workers = self.num_workers > 0
        iterator: Any = BackgroundIterator(
            itertools.islice(items, skip, None) if skip else items,
            prefetch_batches=self.prefetch_batches,
            threads=threads,
            stage=stage,
            snapshot=snapshot,
            wanted=self._wanted(done),
            dispose=functools.partial(leave, None if self.persistent_workers else source, tape, place),
            watch=self._prefetch_watch,
            place=place,
        )
        vars(self)["_prefetch_work"] = iterator.work
        if self.transfer is not None:
            iterator = self.transfer.iterate(iterator)
        vars(self)["_prefetch_live"] = weakref.ref(iterator)  # Lightning records attributes that are set
        self._prefetch_place = iterator.place
        if tape is not None:
            tape.follow(place, iterator.place)
        return iterator

    def _resume(self) -> dict[str, Any]:
        """The state that the next epoch begins with: one that was loaded, until a batch was handed out after it."""
        state, place = self._prefetch_resume, self._prefetch_place
        return START if state is None or (place is not None and not place.untouched) else state

    def _wanted(self, done: int) -> int | None:
        """How many batches are to be taken ahead; ``None`` for all, and the end after them."""
        # Some samplers draw once more at their end, for which a plain loader with a length need not be asked.
        mapped, tape = not isinstance(self.dataset, IterableDataset), self._prefetch_tape
        draws = mapped and (self._stateful or (tape is not None and bool(tape.own) and not self.num_workers))
        asked = self._prefetch_wanted and self._prefetch_wanted()
        length = length_of(self) if draws or asked is not None else None
        wanted = min(number for number in (length, asked, float("inf")) if number is not None)
        return None if wanted == float("inf") or (wanted == length and not draws) else max(0, int(wanted) - done)

    def start_next_epoch(self, *stages: Callable[[Any], Any]) -> bool:
        """Begin to load the next epoch, so that its first batches are ready when ``iter()`` is called for it.

        Call it when the last batch of an epoch was handed out. The order of the next epoch is drawn from the random
        generators as they are at this moment, in the calling thread, and not at ``iter()``; set the epoch of a
        distributed sampler before. The current epoch cannot go on.

        Args:
            stages: Called on each batch in the background, for example to pin its memory.

        Returns:
            Whether it was begun. It is not for an ``IterableDataset`` without worker processes, and with a class
            behind this one that keeps its own state.
        """
        if self._prefetch_next is not None:
            return True
        mapped = not isinstance(self.dataset, IterableDataset)
        if self._stateful or not (mapped or self.num_workers):
            return False
        live, place = self._current(), self._prefetch_place
        if live is not None and not live.ended:
            whole = mapped and place is not None and place.consumed == length_of(self)
            live.finish() if whole else live.close("the next epoch was started")
        iterator: Any = PrefetchLoader.__iter__(self)  # to which the __iter__ of a class in front leads in its turn
        if self._prefetch_tape is not None:
            self._prefetch_tape.draw()
        for stage in stages:
            iterator.add_stage(stage)
        iterator.start()
        vars(self)["_prefetch_next"] = iterator
        return True

    def _divisible(self, source: Any) -> bool:
        """Whether several threads can load what ``source`` would; tells once why they cannot."""
        why = undivided(self, source)
        if why and not self._prefetch_watch.refused:
            self._prefetch_watch.refused = True
            warnings.warn(
                f"prefetch_threads={self.prefetch_threads} has no effect here: {why}. One thread works ahead. Leave it "
                "out, or use a dataset with indices and num_workers=0.",
                NoEffectWarning,
                stacklevel=3,
            )
        return not why

    def _current(self) -> Any:
        return self._prefetch_live() if self._prefetch_live is not None else None

    def _retire(self) -> None:
        """End the thread of the iterator before this one."""
        live, work, tape = self._current(), self._prefetch_work, self._prefetch_tape
        if live is not None and live.ended:
            live = None
        if self.persistent_workers:
            if live is not None:
                live.close("its worker processes serve a newer iterator of the same loader (persistent_workers=True)")
            if work is not None and not work.wait():
                raise RuntimeError("The worker processes are still busy with a batch of the iterator before this one.")
        elif live is None and work is not None and tape is not None and tape.own:
            work.wait()  # for what was drawn ahead to go back
        elif live is not None and live.park() and tape is not None:
            tape.put_back(tape.place)

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iterator stands, counted in batches that were handed out.

        With a class behind this one that keeps its own state, that state as it was after the last batch handed out.
        Otherwise the count, the states of the random generators from which the order follows and, for the epoch
        after it, of those that belong to the loader and its samplers, and whether the epoch is over by this loader's
        own length. Random numbers that worker processes draw for augmentation are not part of it.
        """
        tape, place, loaded = self._prefetch_tape, self._prefetch_place, self._resume()
        if self._stateful:
            state = (None if loaded is START else loaded) if place is None else place.state
            return traced(cast(Any, super()).state_dict() if state is None else state, place)
        if place is None or (self._prefetch_next is None and loaded is not START):
            return dict(loaded)
        length = length_of(self)
        return {
            "consumed": place.consumed,
            "order": None if tape is None else tape.began,
            "own": [] if tape is None else tape.states_now() if place.consumed else tape.start,
            "whole": place.ended or place.consumed == length,
            "ended": place.ended,
            "length": length,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter()`` go on where ``state_dict`` was taken.

        A dataset with indices is not asked for what was consumed; an ``IterableDataset`` is run through it, and so is
        a loader whose class has an ``__iter__`` of its own.

        Args:
            state_dict: What ``state_dict`` returned, for a loader with the same dataset and samplers.

        Raises:
            ValueError: If it is the state of another kind of loader.

        Warns:
            TurboWarning: If the state is of the middle of an epoch, and the loader has another length now, or worker
                processes hand out batches as they are ready (``in_order=False``).
        """
        counted = {"consumed", "order"} <= state_dict.keys()
        if counted == self._stateful:
            raise ValueError(foreign(self, state_dict))
        if not self._stateful:
            warn_of_gaps(self, state_dict)
        self.close()
        self._prefetch_place = None
        self._prefetch_resume = begun(state_dict) if self._stateful else dict(state_dict)

    def close(self) -> None:
        """End the current iterator, its thread and all worker processes, persistent ones too. May be called twice."""
        live = self._current()
        self._prefetch_live = self._prefetch_next = None
        if live is not None:
            live.close("its loader was closed")
        workers, self._iterator = self._iterator, None
        end_workers(workers)

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        state.update(
            _iterator=None,
            _prefetch_live=None,
            _prefetch_work=None,
            _prefetch_next=None,
            _prefetch_place=None,
            _prefetch_tape=None,
            _prefetch_resume=self._resume(),
            _prefetch_wanted=None,
        )
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        behind = getattr(type(self), "_behind", None)
        if behind is None:
            return super().__reduce_ex__(protocol)
        return _blank, (behind,), self.__getstate__()


def prefetching(cls: type[DataLoader[Any]]) -> type[PrefetchLoader]:
    """Return a class that inherits from ``PrefetchLoader`` and ``cls`` and takes the arguments of both.

    The same class for the same ``cls``, so that objects of it can be pickled, compared by class and built anew.
    """
    if issubclass(cls, PrefetchLoader):
        return cls
    if cls is DataLoader:
        return PrefetchLoader
    made = _made.get(cls)
    if made is None:

        def __init__(self: PrefetchLoader, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            PrefetchLoader.__init__(self, *args, **kwargs)

        __init__.__signature__ = _signature(cls)
        made = type(f"Prefetch{cls.__name__}", (PrefetchLoader, cls), {"__init__": __init__, "_behind": cls})
        made.__module__, made.__doc__ = cls.__module__, cls.__doc__
        _made[cls] = made
    return made


_made: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()


def _signature(cls: type) -> inspect.Signature:
    """The constructor's arguments of both classes, for trainers that build a loader anew by its signature."""
    own = inspect.signature(PrefetchLoader.__init__).parameters
    theirs = list(inspect.signature(cls.__init__).parameters.values())
    kinds = inspect.Parameter
    end = len(theirs) - (bool(theirs) and theirs[-1].kind is kinds.VAR_KEYWORD)
    added = [own[name] for name in ("prefetch_batches", "prefetch_threads", "transfer")]
    return inspect.Signature([*theirs[:end], *added, *theirs[end:]])


def _blank(behind: type[DataLoader[Any]]) -> PrefetchLoader:
    """An empty loader of the class made for ``behind``, for unpickling."""
    cls = prefetching(behind)
    return cls.__new__(cls)


PrefetchLoader.__init__.__signature__ = _signature(DataLoader)
