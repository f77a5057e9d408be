"""``PrefetchLoader``, the DataLoader that keeps some batches ahead."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._checks import check_count
from lightning_turbo._random import generator_state, generators_in, same_random_numbers, set_shared_state, shared_state
from lightning_turbo.data.loading import streams
from lightning_turbo.data.loading.background import Background
from lightning_turbo.data.loading.locks import TURNS, LoadingLock
from lightning_turbo.data.loading.prefetcher import PrefetchIterator
from lightning_turbo.data.loading.resume import (
    FRESH_STATE,
    Position,
    ResumableOrder,
    batches_before,
    describe,
    length_of,
    warn_of_gaps,
    wrong_kind,
)
from lightning_turbo.data.loading.source import stand_ins, standing_in
from lightning_turbo.data.loading.spawned import check_workers_can_start
from lightning_turbo.data.loading.thread_policy import LoadProfile, ThreadPolicy
from lightning_turbo.data.loading.threads import ThreadedDataset
from lightning_turbo.data.loading.torch_workers import end_workers, is_torchs_iterator
from lightning_turbo.data.loading.whole_batches import has_whole_batches
from lightning_turbo.data.loading.worker_start import LongLists
from lightning_turbo.data.sample_seeds import SeededDataset, add_seeds, check_seed, loads_batches
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["DEPTH", "PrefetchLoader", "copy_loader", "prefetching", "with_workers"]

DEPTH = 8
T = TypeVar("T", covariant=True)


class _Run:
    """What a loader keeps of its latest iterator and of a state for the next one. A copy of the loader has its own."""

    def __init__(self, loaded: dict[str, Any] | None = None) -> None:
        self.loaded = loaded  # a state until a batch was returned after it
        self.live: weakref.ref[Any] | None = None
        self.thread: Any = None  # of that iterator, which the collector may take while the thread still loads
        self.position: Position | None = None
        self.stream_rng: dict[str, Any] | None = None  # the global RNGs when the epoch of a stream began
        self.order: ResumableOrder | None = None
        self.threaded: ThreadedDataset | None = None
        self.lists = LongLists()  # of the dataset, for worker processes that are not forked
        self.limit: Callable[[], float] | None = None
        self.is_owner: Callable[[], bool] | None = None  # whether who limits it is who asks for an iterator now
        self.original: Any = None  # the loader that this one was made of, whose owner may have kept it
        self.seen: dict[str, Any] = {}  # its attributes, as they were taken over


class _Kind(enum.Enum):
    """What a loader is, for good, and with it how an epoch goes on."""

    OWN_STATE = enum.auto()  # a class behind keeps a state, which is given as it is
    STREAM = enum.auto()  # there is no order of indices: batches that were used are run through
    RUN_THROUGH = enum.auto()  # the order is recorded, but an __iter__ of its own makes the batches of it
    INDICES = enum.auto()  # batches follow from the indices one to one: those that were used are skipped


class PrefetchLoader(DataLoader[T]):
    """A ``torch.utils.data.DataLoader`` whose next batches are prepared in a background thread.

    Takes the arguments of ``DataLoader`` and is one in every respect; the batches and their order are the same, bit
    for bit. To add prefetching to another kind of loader, inherit this class in front of it
    (``class Mine(PrefetchLoader, StatefulDataLoader)``), or call ``PrefetchLoader.of(loader)``.

    One iterator of a loader is in use at a time: a second ``iter()`` closes the first. The thread and the worker
    processes end when the iterator is exhausted, dropped or closed, and when the interpreter ends. Dataset code of all
    loaders runs in one of these threads at a time, unless ``threads`` is above 1; the calling thread must not use a
    dataset meanwhile that a thread reads.

    Args:
        *args: As in ``DataLoader``.
        prefetch_batches: How many batches to keep ready, 1 or more; one more is in preparation. The default of 8
            serves loads of uneven duration; less saves memory, and open files with worker processes.
        threads: How many threads load the samples of a batch at the same time, 1 or more: in this process, or in each
            worker process. For loads that wait, or compute outside the GIL, and a dataset whose ``__getitem__`` may be
            called by several threads at once.
        transfer: What moves the batches to a device as they are returned; a ``DeviceTransfer``.
        sample_seeds: A seed from which, with the epoch and the index of a sample, all random numbers follow that are
            drawn while it is loaded; see ``seed_samples``, to which it leads. Batches are then loaded by worker
            processes, or by the calling thread alone.
        **kwargs: As in ``DataLoader``.

    Raises:
        TypeError: If ``prefetch_batches``, ``threads`` or ``sample_seeds`` is not an integer, or the dataset is a
            loader or, with ``sample_seeds``, an ``IterableDataset``; if worker processes are not forked and what they
            are to be given cannot be pickled, with the name of the attribute.
        ValueError: If ``prefetch_batches`` or ``threads`` is below 1, or ``sample_seeds`` is out of range.

    Warns:
        NoEffectWarning: If loading draws from the global RNGs, or from a generator that the dataset holds; batches are
            then loaded in the calling thread, because the numbers would depend on timing otherwise. If ``threads``
            cannot be used: with an ``IterableDataset``, ``sample_seeds``, batches that are not made of samples, or a
            class behind this one that loads by itself; one thread then works ahead.

    Note:
        With ``persistent_workers`` no thread is started unless a Trainer has told how many batches it takes: the
        processes keep their random states, and would have drawn more after an epoch that is left early than those of a
        plain loader. They load ``prefetch_factor`` batches ahead themselves.

    Example:
        >>> loader = PrefetchLoader(range(6), batch_size=3)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(
        self,
        *args: Any,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        transfer: Any = None,
        sample_seeds: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._run = _Run()
        super().__init__(*args, **kwargs)
        if isinstance(self.dataset, DataLoader):
            raise TypeError(
                f"expected a dataset, got the loader {self.dataset!r}. Pass its dataset, or call "
                "PrefetchLoader.of(loader) to add prefetching to it."
            )
        self._begin_prefetching(prefetch_batches, threads, transfer)
        self.sample_seeds = sample_seeds
        if sample_seeds is not None:
            add_seeds(self, check_seed(sample_seeds, "sample_seeds"))

    def _begin_prefetching(self, prefetch_batches: int, threads: int, transfer: Any) -> None:
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.threads = check_count("threads", threads)
        self.transfer = transfer
        self.sample_seeds: int | None = None
        self._profile = LoadProfile()
        self._run = _Run()
        self._kind = self._find_kind()
        check_workers_can_start(self)

    def _find_kind(self) -> _Kind:
        behind: Any = super()
        if hasattr(behind, "state_dict"):
            return _Kind.OWN_STATE
        if isinstance(self.dataset, IterableDataset):
            return _Kind.STREAM
        return _Kind.INDICES if behind.__iter__.__func__ is DataLoader.__iter__ else _Kind.RUN_THROUGH

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
            transfer: What moves the batches to a device as they are returned.

        Raises:
            TypeError: If ``loader`` is not a ``DataLoader``.
        """
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"PrefetchLoader.of expected a torch.utils.data.DataLoader, got {loader!r}. "
                "For other iterables use DevicePrefetcher or PrefetchIterator."
            )
        twin = copy_loader(loader)
        object.__setattr__(twin, "__class__", prefetching(type(loader)))
        twin._begin_prefetching(prefetch_batches, threads, transfer)
        # Some classes end in __del__ what a copy shares, such as one iterator for all epochs.
        twin._made_of = loader
        twin.follow(loader)
        return twin

    @property
    def counts_batches(self) -> bool:
        """Whether the state is a count of batches, and not that of a class behind this one."""
        return self._kind is not _Kind.OWN_STATE

    @property
    def was_plain(self) -> bool:
        """Whether the loader that ``of`` made this one of has no state of its own."""
        return hasattr(self, "_made_of") and self.counts_batches

    def may_begin_with(self, state: dict[str, Any]) -> bool:
        """Whether the next epoch can begin with a state of a whole one of a loader that may have been another."""
        is_stream = self._kind is _Kind.STREAM
        if is_stream or not self.counts_batches:
            return is_stream == (state.get("samples") is not None and state["samples"]["ranks"] is None)
        return len(state["own"]) in (0, len(cast(Any, self._index_sampler).generators))

    def follow(self, original: DataLoader[Any]) -> None:
        """Take over, at each ``iter()``, attributes that are set from now on on a loader that this one was made of.

        Its owner may have kept it, and set an epoch there.
        """
        self._run.original, self._run.seen = original, dict(vars(original))

    def _take_over(self) -> None:
        original, seen = self._run.original, self._run.seen
        for name, value in vars(original).items() if original is not None else ():
            if name != "_iterator" and (name not in seen or seen[name] is not value):
                self.__dict__[name] = seen[name] = value

    def _taking_over(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches of an ``__iter__`` that may look at the loader's attributes before each of them."""
        self._take_over()
        for batch in batches:
            yield batch
            self._take_over()

    @property
    def _index_sampler(self) -> Any:
        """The sampler whose indices are loaded, wrapped so that it can continue where a state was taken."""
        sampler = super()._index_sampler
        if self.__dict__.get("_kind") in (None, _Kind.OWN_STATE, _Kind.STREAM):  # None within DataLoader.__init__
            return sampler
        run = self._run
        if run.order is None or run.order.sampler is not sampler:
            run.order = ResumableOrder(sampler, self)
        return run.order

    def __iter__(self) -> Iterator[T]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._is_in_use():
            return iter(self._beside())
        self._close_iterator("it was followed by another iter() of its loader")
        self._take_over()
        self._settle_threads()
        run = self._run
        run.loaded = self._state_to_load()
        # To make an iterator is dataset code too: a stream opens its files there, a sampler asks for a length.
        with contextlib.nullcontext() if self.num_workers or self.threads > 1 else TURNS:
            is_own = self._kind is _Kind.OWN_STATE
            epoch = self._begin_own() if is_own else self._begin_counted(run.loaded or FRESH_STATE)
        run.live, run.thread, run.position = weakref.ref(epoch), epoch.background, epoch.position
        return epoch

    def _is_in_use(self) -> bool:
        """Whether a Trainer goes on to take batches of the latest iterator, and somebody else asks for another one."""
        is_owner = self._run.is_owner
        if is_owner is None:
            return False
        live = None if self._run.live is None else self._run.live()
        return live is not None and not live.is_over and not is_owner()

    def _beside(self) -> PrefetchLoader[T]:
        """Return a loader for whoever looks at some batches in the middle of a Trainer's epoch: no thread, no state."""
        order, position = self._run.order, self._run.position
        if order is not None and position is not None and order.length is not None:
            # All of it was drawn at its first entry: generators of the loader stand where a plain loader's come later.
            order.put_back(position)
        twin = copy_loader(self)
        twin._run = _Run()
        twin.transfer = None
        twin.limit_batches(lambda: 0)
        return twin

    def _begin_own(self) -> PrefetchIterator:
        """Begin an epoch of a class that keeps its own state, which is noted after each batch."""
        behind: Any = super()
        if self._run.loaded is not None:
            behind.load_state_dict(self._run.loaded)
        source = behind.__iter__()
        state_dict, position = getattr(source, "state_dict", behind.state_dict), Position()
        position.keep(copy.deepcopy(state_dict()))
        return self._make_iterator(source, position, snapshot=lambda: copy.deepcopy(state_dict()))

    def _begin_counted(self, state: dict[str, Any]) -> PrefetchIterator:
        """Begin an epoch of a loader without a state of its own, or continue one: its batches are counted."""
        # Batches that were used, and how the epoch began that is continued here. A new epoch has none of either.
        done, began = (0, None) if state.get("whole") else (state["consumed"], state["order"])
        position = Position(done, state.get("next_rng") if began else None, self._generators_of_dataset())
        # torch draws a seed for its processes here, which an epoch that is continued has drawn already.
        with same_random_numbers() if began else contextlib.nullcontext():
            is_stream = self._kind is _Kind.STREAM
            source = self._begin_stream(state, position) if is_stream else self._begin_order(state, position)
            if self._kind is _Kind.RUN_THROUGH:
                _run_through(source, done - batches_before(state))
        # Where loading draws nothing, no generators were looked for, and ``go_on`` would miss them.
        if self._profile.draws != "":
            position.go_on(state.get("held", ()))
        snapshot = streams.state_of(self, position.samples is not None) if is_stream else None
        return self._make_iterator(source, position, snapshot=snapshot)

    def _generators_of_dataset(self) -> list[Any]:
        """The random generators that the dataset holds, if it is loaded in this process and may draw from them."""
        of_samples = isinstance(self.dataset, SeededDataset)  # and set for each of them
        return [] if self.num_workers or of_samples or self._profile.draws == "" else generators_in(self.dataset)

    def _begin_order(self, state: dict[str, Any], position: Position) -> Any:
        order: Any = self._index_sampler
        skip = position.consumed - batches_before(state) if self._kind is _Kind.INDICES else 0
        order.begin(state, skip, position)
        return self._make_source()

    def _begin_stream(self, state: dict[str, Any], position: Position) -> Any:
        """Begin a stream, or go on in it: by its own state, if it has an exact one, or through what was used of it."""
        began = None if state.get("whole") else state["order"]
        if not streams.is_within_epoch(state):
            return self._open_stream(began, position)
        position.samples = state.get("samples")
        if state.get("ended") and (position.samples or {}).get("at") is not None:
            return iter(())  # another batch size has come to the end of the epoch already
        # Batches that need not be loaded once more: by the stream's own state, which is loaded before it is opened, or
        # else by the samples that are left out once it is.
        done = streams.restore(self, state, position)
        source = self._open_stream(began, position)
        done = streams.skip_samples(source, state) if done is None else done
        _run_through(source, position.consumed - done)
        return source

    def _open_stream(self, began: dict[str, Any] | None, position: Position) -> Any:
        """Open a stream; one that is continued draws what it drew from the random generators at its beginning."""
        if began is not None:
            set_shared_state(began["iter"], position.dataset_generators)
        self._run.stream_rng = shared_state(position.dataset_generators)
        source = self._make_source()
        if began is not None and began["first"] is not None:
            position.rng_before_first = began["first"]
            set_shared_state(began["first"], position.dataset_generators)
        return source

    def _make_source(self) -> Any:
        """Return torch's iterator over the batches, or that of the class behind this one."""
        behind: Any = super()
        if behind.__iter__.__func__ is not DataLoader.__iter__:
            source = behind.__iter__()
            return source if is_torchs_iterator(source) else self._taking_over(source)
        run = self._run
        if self.threads > 1:
            # One for each iterator: a thread that comes back late closes its own. What was found out goes along.
            before = run.threaded
            run.threaded = ThreadedDataset(self.dataset, self.threads) if before is None else copy.copy(before)
        given = stand_ins(self, run.threaded, run.lists)
        with standing_in(self, given) if given else contextlib.nullcontext():
            return behind.__iter__()

    def _make_iterator(
        self, source: Any, position: Position, snapshot: Callable[[], Any] | None = None
    ) -> PrefetchIterator:
        run, threaded = self._run, self._run.threaded
        limit = inf if run.limit is None else run.limit() - position.consumed
        if self.persistent_workers and run.limit is None:
            limit = 0  # no thread, see the note in the docstring of this class
        workers = None if self.persistent_workers else source  # that end with this epoch
        lock = LoadingLock() if threaded and not self.num_workers else TURNS
        on_close = functools.partial(_leave, workers, run.order, threaded, position)
        background = Background(source, lock, limit, snapshot, on_close)
        is_seeded = isinstance(self.dataset, SeededDataset)
        return PrefetchIterator._of_loader(
            background,
            ThreadPolicy(self._profile, has_workers=background.has_workers, is_seeded=is_seeded),
            position,
            prefetch_batches=self.prefetch_batches,
            transfer=None if self.transfer is None or self.transfer.idle else self.transfer,
            timeout=self.timeout,
        )

    def limit_batches(self, limit: Callable[[], float] | None, is_owner: Callable[[], bool] | None = None) -> None:
        """Have each epoch load no more batches ahead than ``limit()`` says when it begins; infinity for all.

        For what knows the limits of a Trainer. With ``persistent_workers`` it lets a thread take the batches. ``None``
        takes it back.

        Args:
            limit: How many batches are taken of an epoch at most.
            is_owner: Whether it is the Trainer that asks for an iterator. While it uses one, others get an iterator
                beside it; ``None`` for a loader whose latest iterator is the one in use, whoever asks.
        """
        self._run.limit = limit
        self._run.is_owner = is_owner

    def _settle_threads(self) -> None:
        """Leave one thread where several cannot load the samples, and tell once why."""
        why = "" if self.threads == 1 else self._why_one_thread()
        if why:
            warnings.warn(
                f"threads={self.threads} has no effect here: {why}. One thread works ahead. Leave it out, or use a "
                "dataset with indices.",
                NoEffectWarning,
                stacklevel=3,
            )
            self.threads = 1

    def _why_one_thread(self) -> str:
        if isinstance(self.dataset, SeededDataset):
            return "the generators that are seeded for each sample belong to the process, and all of its threads"
        if isinstance(self.dataset, IterableDataset):
            return f"the dataset is an IterableDataset ({type(self.dataset).__name__}), which one thread runs through"
        if self._kind is not _Kind.INDICES:
            return f"{type(self).__name__} does not load by torch's own iterator"
        if not self._auto_collation:
            return "batch_size=None makes no batches, whose samples could be shared out among threads"
        if has_whole_batches(self):
            return f"the batches of a {type(self.dataset).__name__} are made by one index, without its samples"
        if loads_batches(self.dataset):
            return f"{type(self.dataset).__name__} loads a batch in one call, by its __getitems__"
        return ""

    def _state_to_load(self) -> dict[str, Any] | None:
        """The state that the next epoch begins with: one that was loaded, until a batch was returned after it."""
        position = self._run.position
        return self._run.loaded if position is None or position.is_untouched else None

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iterator is, counted in batches that were returned.

        The count and, over a dataset with indices, the states of the random generators from which the order follows
        and, for the epoch after it, of those that belong to the loader and its samplers. Over a stream the states of
        the global RNGs at its beginning. Without worker processes, those of the generators that the dataset holds.
        With a class behind this one that keeps its own state, that after the latest batch. Random numbers that worker
        processes draw for augmentation are not part of it; with ``sample_seeds`` they need not be.

        Warns:
            TurboWarning: If the dataset holds a generator in worker processes, or a sampler counts its passes by
                itself: no state tells of these.
        """
        run, position, loaded = self._run, self._run.position, self._state_to_load()
        if loaded is not None:
            return dict(loaded)
        if self._kind is _Kind.OWN_STATE:
            return cast(Any, super()).state_dict() if position is None else position.states[-1][1]
        if position is None:
            return dict(FRESH_STATE)
        with same_random_numbers():  # from which a sampler may draw to tell its length
            length = run.order.length if run.order is not None and self._kind is _Kind.INDICES else None
            state = describe(position, length_of(self) if length is None else length)
        self._warn_of_generators(state["whole"])
        state["held"] = [generator_state(each) for each in position.dataset_generators]
        state["before"] = position.rng_before_latest
        if run.order is None:
            order = {"iter": run.stream_rng, "first": position.rng_before_first}
            return {**FRESH_STATE, **state, "order": order, "samples": streams.place_of(self, position)}
        run.order.counters.warn(state["whole"])
        left = run.order.states_here()
        own = run.order.states_at_end() if state["whole"] else left
        samples = run.order.samples()
        return {**state, "own": own, "left": left, "order": run.order.epoch_rng, "samples": samples}

    def _warn_of_generators(self, over: bool) -> None:
        """Warn of generators that the dataset holds in each worker process; those of new processes begin again."""
        lost = self.num_workers and (self.persistent_workers or not over)
        if lost and not isinstance(self.dataset, SeededDataset) and generators_in(self.dataset):
            warnings.warn(
                f"{type(self.dataset).__name__} holds a random generator, of which each worker process has its own, "
                "whose state is not part of the loader's state: what is drawn from it is not the same in a run that "
                "goes on from here. Pass sample_seeds=0, with which random numbers follow from the sample.",
                TurboWarning,
                stacklevel=3,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter()`` go on where ``state_dict`` was taken.

        A dataset with indices is not asked for what was consumed; an ``IterableDataset`` is run through it, and so is
        a loader whose class has an ``__iter__`` of its own. That ``iter()`` leaves the global RNGs as they are.

        Args:
            state_dict: What ``state_dict`` returned, for a loader with the same dataset and samplers.

        Raises:
            ValueError: If it is the state of another kind of loader.

        Warns:
            TurboWarning: If the state is of the middle of an epoch, and the loader has another length now, or worker
                processes return batches as they are ready (``in_order=False``).
        """
        # A state with a count is of a loader that counts, and no other.
        is_counted = {"consumed", "order"} <= state_dict.keys()
        if is_counted == (self._kind is _Kind.OWN_STATE):
            raise ValueError(wrong_kind(self, state_dict))
        if is_counted:
            is_stream = self._kind is _Kind.STREAM
            adapt = functools.partial(streams.adapt, self) if is_stream else cast(Any, self._index_sampler).adapt
            state_dict = adapt(state_dict)
            warn_of_gaps(self, state_dict)
        self.close()
        self._run.position, self._run.loaded = None, dict(state_dict)

    def _close_iterator(self, because: str) -> None:
        live = None if self._run.live is None else self._run.live()
        if live is not None:
            live.close(because)
        elif self._run.thread is not None:
            self._run.thread.close()

    def close(self) -> None:
        """End the current iterator, its thread and all worker processes, persistent ones too. May be called twice."""
        self._close_iterator("its loader was closed")
        workers, self._iterator = self._iterator, None
        end_workers(workers)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_iterator": None, "_run": _Run(self._state_to_load())}
        state.pop("_made_of", None)
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        behind = getattr(type(self), "_behind", None)
        if behind is None:
            return super().__reduce_ex__(protocol)
        return _blank, (behind,), self.__getstate__()


def copy_loader(loader: DataLoader[Any]) -> Any:
    """Return a copy of a loader with worker processes and records of its own; dataset and samplers are shared."""
    twin = copy.copy(loader)
    for name, value in vars(twin).items():
        if isinstance(value, list) and name.startswith("__"):  # records that a trainer keeps of this loader
            vars(twin)[name] = list(value)
    twin._iterator = None
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
    # What was found out where processes load does not hold where this one does, and the other way round.
    if isinstance(twin, PrefetchLoader):
        twin._profile = LoadProfile()
    stays = twin.persistent_workers if persistent is None else persistent
    vars(twin)["persistent_workers"] = stays and number > 0
    twin.num_workers = number
    return twin


def _run_through(source: Iterator[Any], count: int) -> None:
    """Load batches that were used, and drop them; one that raised an error counted as used, and may raise it again."""
    for _ in range(count):
        with contextlib.suppress(Exception):
            next(source)


def _leave(workers: Any, order: ResumableOrder | None, threaded: ThreadedDataset | None, position: Position) -> None:
    """Let go of an iterator: end its processes and threads, and put back what its sampler drew ahead."""
    end_workers(workers)
    if threaded is not None:
        threaded.close()
    if order is not None:
        order.put_back(position)


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
