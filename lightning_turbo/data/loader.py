"""``PrefetchLoader``, the DataLoader that keeps some batches ahead."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._checks import check_count
from lightning_turbo.data.epoch import Epoch
from lightning_turbo.data.pending import PendingCollate, ThreadedDataset
from lightning_turbo.data.position import (
    START,
    Position,
    ResumableSampler,
    begin_epoch,
    end_workers,
    length_of,
    note_state,
    warn_of_gaps,
    wrong_kind,
)
from lightning_turbo.data.prefetcher import LoadProfile
from lightning_turbo.data.sample_seeds import SeededDataset, add_seeds, check_seed, index_sampler_name
from lightning_turbo.errors import NoEffectWarning

__all__ = ["DEPTH", "PrefetchLoader", "copy_loader", "lock_of", "prefetching", "with_workers"]

DEPTH = 8
_NO_ORDER: tuple[int, ...] = ()
T = TypeVar("T", covariant=True)
_locks: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()


class PrefetchLoader(DataLoader[T]):
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
            serves loads of uneven duration; less saves memory, and open files with worker processes.
        threads: How many threads load samples at the same time, 1 or more: in this process, or in each worker process.
            For loads that wait, or compute outside the GIL, and a dataset whose ``__getitem__`` may be called by
            several threads at once.
        transfer: What moves the batches to a device as they are handed out; see ``DevicePrefetcher``.
        sample_seeds: A seed from which, with the epoch and the index of a sample, all random numbers follow that are
            drawn while it is loaded; see ``seed_samples``, to which it leads. Batches are then loaded by worker
            processes, or by the asking thread alone.
        **kwargs: As in ``DataLoader``.

    Raises:
        TypeError: If ``prefetch_batches``, ``threads`` or ``sample_seeds`` is not an integer, or the dataset is a
            loader or, with ``sample_seeds``, an ``IterableDataset``.
        ValueError: If ``prefetch_batches`` or ``threads`` is below 1, or ``sample_seeds`` is out of range.

    Warns:
        NoEffectWarning: If loading draws from the global RNGs; batches are then loaded in the
            asking thread, because the numbers would depend on timing otherwise. If ``threads`` cannot be used: with an
            ``IterableDataset``, ``sample_seeds``, or a class behind this one that loads by itself; one thread then
            works ahead.

    Example:
        >>> loader = PrefetchLoader(range(6), batch_size=3)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
    """

    _prefetch_live: weakref.ref[Any] | None
    _prefetch_loading: Any
    _prefetch_next: Any
    _prefetch_position: Position | None
    _prefetch_sampler: ResumableSampler
    _prefetch_wanted: Callable[[], float]
    _prefetch_turn: Any

    def __init__(
        self,
        *args: Any,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        transfer: Any = None,
        sample_seeds: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._begin_prefetching(prefetch_batches, threads, transfer)
        super().__init__(*args, **kwargs)
        if isinstance(self.dataset, DataLoader):
            raise TypeError(
                f"expected a dataset, got the loader {self.dataset!r}. Pass its dataset, or call "
                "PrefetchLoader.of(loader) to add prefetching to it."
            )
        self.sample_seeds = sample_seeds
        if sample_seeds is not None:
            add_seeds(self, check_seed(sample_seeds, "sample_seeds"))

    def _begin_prefetching(self, prefetch_batches: int, threads: int, transfer: Any) -> None:
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.threads = check_count("threads", threads)
        self.transfer = transfer
        self.sample_seeds: int | None = None
        self._prefetch_profile = LoadProfile()
        self._prefetch_loaded: dict[str, Any] | None = None
        # Not by assignment: Lightning records and copies what is assigned, and an iterator cannot be copied.
        vars(self).update(_idle())

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        *,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        transfer: Any = None,
    ) -> PrefetchLoader[Any]:
        """Return a loader like ``loader``, of a class that inherits from its class, with prefetching added.

        Dataset, samplers and every attribute are shared; ``loader`` itself is not changed.

        Args:
            loader: A ``DataLoader`` of any class.
            prefetch_batches: How many batches to keep ready, 1 or more.
            threads: How many threads load samples at the same time, 1 or more.
            transfer: What moves the batches to a device as they are handed out.

        Raises:
            TypeError: If ``loader`` is not a ``DataLoader``.
        """
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"PrefetchLoader.of expected a torch.utils.data.DataLoader, got {loader!r}. "
                "For other iterables use DevicePrefetcher or BackgroundIterator."
            )
        twin = copy_loader(loader)
        object.__setattr__(twin, "__class__", prefetching(type(loader)))
        twin._begin_prefetching(prefetch_batches, threads, transfer)
        return twin

    @property
    def _index_sampler(self) -> Any:
        """The sampler whose indices are loaded, wrapped so that it can continue where a state was taken."""
        return self._order() if self._has_order else super()._index_sampler

    @property
    def _has_order(self) -> bool:
        return not (self._keeps_state or isinstance(self.dataset, IterableDataset))

    def _order(self) -> ResumableSampler:
        """The order of the indices; one of no indices over a stream."""
        sampler: Any = _NO_ORDER
        generator = None
        if self._has_order:
            sampler, generator = super()._index_sampler, self.generator
        if self._prefetch_sampler.sampler is not sampler:
            self._prefetch_sampler = ResumableSampler(sampler, generator)
        return self._prefetch_sampler

    @property
    def _keeps_state(self) -> bool:
        """Whether the class behind keeps a state that a count of batches does not give back.

        torchdata's ``StatefulDataLoader`` over a dataset with indices does not, unless a part of it has a state too.
        """
        if not hasattr(super(), "state_dict"):
            return False
        parts = self.dataset, self.sampler, self.batch_sampler
        streams = isinstance(self.dataset, IterableDataset)
        return streams or not self._iterates_as_torch or any(hasattr(part, "state_dict") for part in parts)

    @property
    def _iterates_as_torch(self) -> bool:
        known = [
            DataLoader,
            getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", DataLoader),
        ]
        return getattr(super().__iter__, "__func__", None) in [cls.__iter__ for cls in known]

    def __iter__(self) -> Iterator[T]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._prefetch_next is not None:
            started = self._prefetch_next
            vars(self)["_prefetch_next"] = None
            return started
        self._retire()
        loaded = self._prefetch_loaded = self._state_to_load()
        epoch = self._begin_stateful(loaded) if self._keeps_state else self._begin_counted(loaded)
        if self.transfer is not None and not self.transfer.idle:
            epoch.use(self.transfer)
        vars(self)["_prefetch_loading"] = epoch._loading
        vars(self)["_prefetch_live"] = weakref.ref(epoch)
        self._prefetch_position = epoch.position
        return epoch

    def _begin_counted(self, loaded: dict[str, Any]) -> Epoch:
        """Begin an epoch of a loader without a state of its own: its order is recorded, its batches are counted."""
        sampler = self._order()
        done = 0 if loaded.get("whole") else loaded["consumed"]
        # Where batches do not follow from the indices one to one, those that were used are run through.
        counts = self._iterates_as_torch and not isinstance(self.dataset, IterableDataset)
        indices, batches = (done, 0) if counts else (0, done)
        sampler.rewind(loaded, indices, seed_was_drawn=self.persistent_workers)
        source, settings = self._make_source(sampler)
        position = sampler.position = Position(done)  # whom the sampler asks what was handed out
        return self._epoch(source, position, skip=batches, snapshot=sampler.recorder(), **settings)

    def _make_source(self, sampler: Any) -> tuple[Any, dict[str, Any]]:
        """Return torch's iterator over the batches, and how it is loaded from.

        Without threads torch's own ``__iter__`` finds the sampler by ``_index_sampler``. With threads a view of the
        loader is iterated, whose sampler, dataset and ``collate_fn`` are put together here.
        """
        if not self._can_use_threads():
            return cast(Any, super()).__iter__(), {"turn": self._turn()}
        samples = ThreadedDataset(self.dataset, self.threads, self._prefetch_profile)
        view: Any = object.__new__(DataLoader)
        vars(view).update(vars(self))
        vars(view).update(dataset=samples, collate_fn=PendingCollate(cast(Any, self.collate_fn)))
        vars(view)[index_sampler_name(self)] = sampler
        source = iter(view)
        vars(self)["_iterator"] = view._iterator  # persistent workers, which a Trainer ends here
        return source, {} if self.num_workers else {"ahead": self.threads, "rest": samples.close}

    def _turn(self) -> Any:
        """The lock to hold while a batch is loaded; none where worker processes load it."""
        return None if self.num_workers else self._prefetch_turn or turn_of(self.dataset)

    def _can_use_threads(self) -> bool:
        """Whether several threads load samples; tells once why they cannot where they were asked for."""
        if self.threads == 1:
            return False
        why = self._why_one_thread()
        if why:
            warnings.warn(
                f"threads={self.threads} has no effect here: {why}. One thread works ahead. Leave it out, or use a "
                "dataset with indices.",
                NoEffectWarning,
                stacklevel=3,
            )
            self.threads = 1
        return not why

    def _why_one_thread(self) -> str:
        if isinstance(self.dataset, SeededDataset):
            return "the generators that are seeded for each sample belong to the process, and all of its threads"
        if isinstance(self.dataset, IterableDataset):
            return f"the dataset is an IterableDataset ({type(self.dataset).__name__}), which one thread runs through"
        own = self._keeps_state or not self._iterates_as_torch
        return f"{type(self).__name__} does not load by torch's own iterator" if own else ""

    def _begin_stateful(self, loaded: dict[str, Any]) -> Epoch:
        """Begin an epoch of a class that keeps its own state, which is recorded with each batch."""
        self._can_use_threads()
        behind: Any = super()
        source, position = begin_epoch(self, behind, self._prefetch_position, loaded)
        snapshot = functools.partial(note_state, getattr(source, "state_dict", behind.state_dict))
        return self._epoch(source, position, snapshot=snapshot, turn=self._turn())

    def _epoch(self, source: Any, position: Position, **settings: Any) -> Epoch:
        """Return an epoch; ``settings`` go to ``_Loading``."""
        profile = self._prefetch_profile
        profile.workers = self.num_workers > 0
        if isinstance(self.dataset, SeededDataset) and not self.num_workers and profile.draws is None:
            profile.decide(["torch", "random", "numpy.random"])  # which are put back after each batch
        left = None if self.persistent_workers else source
        return Epoch(
            source, position,
            profile=profile, timeout=self.timeout, prefetch_batches=self.prefetch_batches,
            wanted=min(self._known_length(), self._prefetch_wanted()) - position.consumed,
            dispose=functools.partial(_leave, left, self._prefetch_sampler, position), **settings,
        )  # fmt: skip

    def _known_length(self) -> float:
        """How many batches an epoch has, infinity if that is not known."""
        return inf if isinstance(self.dataset, IterableDataset) else length_of(self) or inf

    def _state_to_load(self) -> dict[str, Any]:
        """The state that the next epoch begins with: one that was loaded, until a batch was handed out after it."""
        state, position = self._prefetch_loaded, self._prefetch_position
        return START if state is None or (position is not None and not position.untouched) else state

    def start_next_epoch(self, transfer: Any = None) -> bool:
        """Begin to load the next epoch, so that its first batches are ready when ``iter()`` is called for it.

        Call it when the last batch of an epoch was handed out. The order of the next epoch is drawn from the random
        generators as they are at this moment, in the calling thread, and not at ``iter()``; set the epoch of a
        distributed sampler before. The current epoch cannot go on.

        Args:
            transfer: What moves its batches to a device, if the loader has none.

        Returns:
            Whether it was begun. It is not for an ``IterableDataset`` without worker processes, and with a class
            behind this one that keeps its own state.
        """
        if self._prefetch_next is not None:
            return True
        if self._keeps_state or (isinstance(self.dataset, IterableDataset) and not self.num_workers):
            return False
        self._leave_current()
        epoch: Any = PrefetchLoader.__iter__(self)  # to which the __iter__ of a class in front leads in its turn
        self._prefetch_sampler.draw()
        if transfer is not None and epoch.transfer is None:
            epoch.use(transfer)
        epoch.start()
        vars(self)["_prefetch_next"] = epoch
        return True

    def _leave_current(self) -> None:
        live = self._current()
        if live is not None:
            whole = live.position.consumed == self._known_length()
            live.finish() if whole else live.close("the next epoch was started")

    def _current(self) -> Any:
        """The latest iterator, if it is in use."""
        live = None if self._prefetch_live is None else self._prefetch_live()
        return None if live is None or live.ended else live

    def _retire(self) -> None:
        """End the thread of the iterator before this one."""
        live, loading, sampler = self._current(), self._prefetch_loading, self._prefetch_sampler
        if live is not None and self.persistent_workers:
            live.close("its worker processes serve a newer iterator of the same loader (persistent_workers=True)")
        elif live is not None and live.park():
            sampler.put_back(live.position)
        has_ended = loading is None or loading.join()  # which puts back what was drawn ahead
        if self.persistent_workers and not has_ended:
            raise RuntimeError("The worker processes are still busy with a batch of the iterator before this one.")

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iterator is, counted in batches that were handed out.

        The count and, over a dataset with indices, the states of the random generators from which the order follows
        and, for the epoch after it, of those of torch that belong to the loader and its samplers. With a class behind
        this one that keeps its own state, that after each of the latest batches. Random numbers that worker processes
        draw for augmentation are not part of it; with ``sample_seeds`` they need not be.
        """
        sampler, position, loaded = self._prefetch_sampler, self._prefetch_position, self._state_to_load()
        if position is None or (self._prefetch_next is None and loaded is not START):
            return dict(loaded)
        state = position.describe(length_of(self))
        if self._keeps_state:
            return {**state, "base": list(position.states)}
        # Before a batch: as they were before torch drew a seed from them, which it does again.
        return {**state, "order": sampler.began, "own": sampler.states_now() if position.consumed else sampler.start}

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
        if not {"consumed", "base" if self._keeps_state else "order"} <= state_dict.keys():
            raise ValueError(wrong_kind(self, state_dict))
        warn_of_gaps(self, state_dict)
        self.close()
        self._prefetch_position = None
        self._prefetch_loaded = dict(state_dict)

    def close(self) -> None:
        """End the current iterator, its thread and all worker processes, persistent ones too. May be called twice."""
        live = self._current()
        self._prefetch_live = self._prefetch_next = None
        if live is not None:
            live.close("its loader was closed")
        workers, self._iterator = self._iterator, None
        end_workers(workers)

    def __getstate__(self) -> dict[str, Any]:
        loaded = self._state_to_load()
        return {**vars(self), **_idle(), "_iterator": None, "_prefetch_loaded": None if loaded is START else loaded}

    def __reduce_ex__(self, protocol: Any) -> Any:
        behind = getattr(type(self), "_behind", None)
        if behind is None:
            return super().__reduce_ex__(protocol)
        return _blank, (behind,), self.__getstate__()


def turn_of(dataset: Any) -> Any:
    """Return the lock that loaders of one dataset share, so that two threads do not read it at once."""
    for _ in range(100):  # to the innermost, and not for ever where they are a circle
        dataset = getattr(dataset, "dataset", dataset)
    return lock_of(dataset)


def lock_of(owner: Any) -> Any:
    """Return the lock that belongs to an object as long as anybody holds it, in this process."""
    return _locks.setdefault((os.getpid(), id(owner)), threading.Lock())


def copy_loader(loader: DataLoader[Any]) -> Any:
    """Return a copy of a loader with worker processes and records of its own; dataset and samplers are shared."""
    twin = copy.copy(loader)
    for name, value in vars(twin).items():
        if isinstance(value, list) and name.startswith("__"):  # records that a trainer keeps of this loader
            vars(twin)[name] = list(value)
    vars(twin)["_iterator"] = None
    return twin


def with_workers(loader: DataLoader[Any], number: int, *, persistent: bool | None = None) -> Any:
    """Return a copy of a loader with so many worker processes, which stay from epoch to epoch as it or the caller says.

    A ``DataLoader`` refuses some of these changes once it is made; a copy that nobody iterates has no workers yet.
    """
    twin = copy_loader(loader)
    if number:
        twin.prefetch_factor = twin.prefetch_factor or 2
    else:  # what a loader without workers refuses
        twin.multiprocessing_context = twin.prefetch_factor = None
        twin.timeout = 0
    stays = twin.persistent_workers if persistent is None else persistent
    vars(twin)["persistent_workers"] = stays and number > 0
    twin.num_workers = number
    return twin


def _idle() -> dict[str, Any]:
    """The attributes of a loader that is not being iterated."""
    names = ("live", "loading", "next", "position", "turn")
    none = {f"_prefetch_{name}": None for name in names}
    return {**none, "_prefetch_sampler": ResumableSampler(_NO_ORDER, None), "_prefetch_wanted": _everything}


def _everything() -> float:
    return inf


def _leave(source: Any, sampler: ResumableSampler, position: Position) -> None:
    """Let go of an iterator: end its worker processes, and put back what its sampler drew ahead."""
    end_workers(source)
    sampler.put_back(position)


def prefetching(cls: type[DataLoader[Any]]) -> type[PrefetchLoader[Any]]:
    """Return a class that inherits from ``PrefetchLoader`` and ``cls`` and takes the arguments of both.

    The same class for the same ``cls``, so that objects of it can be pickled, compared by class and built again.
    """
    if issubclass(cls, PrefetchLoader):
        return cls
    if cls is DataLoader:
        return PrefetchLoader
    made = _made.get(cls)
    if made is None:

        def __init__(self: PrefetchLoader[Any], *args: Any, **kwargs: Any) -> None:  # noqa: N807
            PrefetchLoader.__init__(self, *args, **kwargs)

        __init__.__signature__ = _signature(cls)
        made = type(f"Prefetch{cls.__name__}", (PrefetchLoader, cls), {"__init__": __init__, "_behind": cls})
        made.__module__, made.__doc__ = cls.__module__, cls.__doc__
        _made[cls] = made
    return made


_made: dict[type, Any] = {}


def _signature(cls: type) -> inspect.Signature:
    """The constructor's arguments of both classes, for trainers that build a loader again by its signature."""
    own = inspect.signature(PrefetchLoader.__init__).parameters
    theirs = list(inspect.signature(cls.__init__).parameters.values())
    kinds = inspect.Parameter
    end = len(theirs) - (bool(theirs) and theirs[-1].kind is kinds.VAR_KEYWORD)
    added = [own[name] for name in ("prefetch_batches", "threads", "transfer", "sample_seeds")]
    return inspect.Signature([*theirs[:end], *added, *theirs[end:]])


def _blank(behind: type[DataLoader[Any]]) -> PrefetchLoader[Any]:
    """An empty loader of the class made for ``behind``, for unpickling."""
    cls = prefetching(behind)
    return cls.__new__(cls)


PrefetchLoader.__init__.__signature__ = _signature(DataLoader)
