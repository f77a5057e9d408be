"""``PrefetchLoader``, the DataLoader that keeps some batches ahead."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._checks import check_count
from lightning_turbo._random import generators_in
from lightning_turbo.data.loading.background import Background
from lightning_turbo.data.loading.epoch_state import EpochState
from lightning_turbo.data.loading.epochs import Begun, Epochs, IndexEpochs, OwnStateEpochs, epochs_of, length_of
from lightning_turbo.data.loading.locks import TURNS, LoadingLock, starting_workers
from lightning_turbo.data.loading.position import Position
from lightning_turbo.data.loading.prefetcher import PrefetchIterator
from lightning_turbo.data.loading.resumable_sampler import ResumableSampler
from lightning_turbo.data.loading.source import stand_ins, standing_in
from lightning_turbo.data.loading.spawned import check_workers_can_start
from lightning_turbo.data.loading.subclass import blank, copy_loader, make_class, merge_signatures, refuse_added
from lightning_turbo.data.loading.thread_policy import LoadProfile, ThreadPolicy
from lightning_turbo.data.loading.threads import ThreadedDataset
from lightning_turbo.data.loading.torch_workers import end_workers
from lightning_turbo.data.loading.whole_batches import has_whole_batches
from lightning_turbo.data.loading.worker_start import LongLists
from lightning_turbo.data.loading.worker_streams import WorkerPlaces
from lightning_turbo.data.orders.sharding import check_fits
from lightning_turbo.data.sample_seeds import SeededDataset, add_seeds, check_seed, loads_batches
from lightning_turbo.errors import NoEffectWarning, TurboWarning

__all__ = ["DEPTH", "PrefetchLoader", "copy_loader", "prefetching", "with_workers"]

DEPTH = 8
# Seconds. How long the end of an epoch waits for the next() of a stream, which may have nothing to give for ever.
STREAM_PATIENCE = 1.0
T = TypeVar("T", covariant=True)


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
        With ``persistent_workers`` no thread is started unless a Trainer has set how many batches it takes: the
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
        self._epochs: Epochs | None = None  # none while DataLoader's own constructor runs
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
        self._is_twin = False  # made by ``of``
        self._reset_epochs(None)
        check_fits(self)
        check_workers_can_start(self)

    def _reset_epochs(self, loaded: Any) -> None:
        """Set what a loader knows of its epochs, which a copy has of its own, to that of one without an iterator.

        Args:
            loaded: The state that the next epoch begins with, if there is one.
        """
        itself = self._behind.__iter__.__func__ is not DataLoader.__iter__
        self._epochs = epochs_of(self, iterates_itself=itself)
        self._loaded = loaded  # until a batch was returned after it
        self._position: Position | None = None  # of the latest iterator
        self._live: weakref.ref[Any] | None = None  # that iterator
        self._background: Background | None = None  # its thread, which may still load when the collector took it
        self._threaded: ThreadedDataset | None = None
        self._lists = LongLists()  # of the dataset, for worker processes that are not forked
        self.limit_batches(None)

    @property
    def _behind(self) -> Any:
        """The methods of the class behind this one."""
        return super()

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
            TypeError: If ``loader`` is not a ``DataLoader``, or has an argument or attribute with the name of one that
                ``PrefetchLoader`` adds.
        """
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"PrefetchLoader.of expected a torch.utils.data.DataLoader, got {loader!r}. "
                "For other iterables use DevicePrefetcher or PrefetchIterator."
            )
        if not isinstance(loader, PrefetchLoader):
            refuse_added(type(loader), vars(loader))
        twin = copy_loader(loader)
        # torchdata's loader began an iterator for its state, and its next iter() would return that.
        if getattr(loader, "_initial_iter_for_state_dict", False):
            twin.load_state_dict(loader.state_dict())  # pyright: ignore[reportAttributeAccessIssue]
        # Past the __setattr__ of the loader's class, which may be one of its own.
        object.__setattr__(twin, "__class__", prefetching(type(loader)))
        twin._begin_prefetching(prefetch_batches, threads, transfer)
        # Some classes end in __del__ what a copy shares, such as one iterator for all epochs.
        twin._made_of = loader
        twin._is_twin = True
        return twin

    @property
    def counts_batches(self) -> bool:
        """Whether the state is a count of batches, and not that of a class behind this one."""
        return not isinstance(self._epochs, OwnStateEpochs)

    @property
    def was_plain(self) -> bool:
        """Whether the loader that ``of`` made this one of has no state of its own."""
        return self._is_twin and self.counts_batches

    @property
    def _index_sampler(self) -> Any:
        """The sampler whose indices are loaded, wrapped so that it can continue where a state was taken."""
        sampler = super()._index_sampler
        epochs = self._epochs
        if not isinstance(epochs, IndexEpochs):
            return sampler
        # Another one is set by sample seeds, and by who makes a loader's samplers again.
        if epochs.sampler is None or epochs.sampler.sampler is not sampler:
            epochs.sampler = ResumableSampler(sampler, self)
        return epochs.sampler

    def __iter__(self) -> Iterator[T]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._is_in_use():
            return iter(self._beside())
        self._close_iterator("it was followed by another iter() of its loader")
        self._settle_threads()
        self._loaded = self._state_to_load()
        assert self._epochs is not None
        # To make an iterator is dataset code too: a stream opens its files there, a sampler asks for a length.
        with contextlib.nullcontext() if self.num_workers or self.threads > 1 else TURNS:
            try:
                begun = self._epochs.begin(self, self._loaded)
                epoch = self._make_iterator(begun)
            except BaseException:
                # The kind of epochs knows of the latest one alone, and that has not begun.
                self._position = None
                raise
        self._live = weakref.ref(epoch)
        self._background = epoch.background
        self._position = begun.position
        return epoch

    def _is_in_use(self) -> bool:
        """Whether a Trainer goes on to take batches of the latest iterator, and somebody else asks for another one."""
        if self._is_owner is None:
            return False
        live = None if self._live is None else self._live()
        return live is not None and not live.is_over and not self._is_owner()

    def _beside(self) -> PrefetchLoader[T]:
        """Return a loader for whoever looks at some batches in the middle of a Trainer's epoch: no thread, no state."""
        sampler = self._index_sampler
        if isinstance(sampler, ResumableSampler) and self._position is not None and sampler.draws_at_once:
            # Generators of the loader stand where a plain loader's come later.
            sampler.put_back(self._position)
        twin = copy_loader(self)
        twin._reset_epochs(None)
        twin.transfer = None
        twin.limit_batches(lambda: 0)
        return twin

    def _make_source(self, places: WorkerPlaces | None = None) -> Iterator[Any]:
        """Return torch's iterator over the batches, or that of the class behind this one.

        Args:
            places: Returns the states of a stream in worker processes; ``None`` if it has none.
        """
        behind: Any = super()
        starting = starting_workers() if self.num_workers else contextlib.nullcontext()
        if behind.__iter__.__func__ is not DataLoader.__iter__:
            with starting:
                return behind.__iter__()
        if self.threads > 1:
            # One for each iterator: a thread that comes back late closes its own. What was found out goes along.
            before = self._threaded
            self._threaded = ThreadedDataset(self.dataset, self.threads) if before is None else copy.copy(before)
        given = stand_ins(self, self._threaded, self._lists, places)
        with starting, standing_in(self, given) if given else contextlib.nullcontext():
            return behind.__iter__()

    def _make_iterator(self, begun: Begun) -> PrefetchIterator:
        source, position, snapshot, put_back = begun
        limit = inf if self._limit is None else self._limit() - position.consumed
        if self.persistent_workers and self._limit is None:
            limit = 0  # no thread, see the note in the docstring of this class
        workers = None if self.persistent_workers else source  # that end with this epoch
        lock = LoadingLock() if self._threaded is not None and not self.num_workers else TURNS
        on_close = functools.partial(_leave, workers, self._threaded, put_back, position)
        is_live = isinstance(self.dataset, IterableDataset) and not self.num_workers
        patience = STREAM_PATIENCE if is_live else None
        background = Background(source, lock, limit, snapshot, on_close, patience)
        is_seeded = isinstance(self.dataset, SeededDataset)
        return PrefetchIterator._of_loader(
            background,
            ThreadPolicy(self._profile, has_workers=background.has_workers, is_seeded=is_seeded),
            position,
            prefetch_batches=self.prefetch_batches,
            transfer=None if self.transfer is None or self.transfer.idle else self.transfer,
            timeout=self.timeout,
        )

    def limit_batches(
        self,
        limit: Callable[[], float] | None,
        is_owner: Callable[[], bool] | None = None,
        epoch: Callable[[], int] | None = None,
    ) -> None:
        """Follow a Trainer, which knows how many batches it takes, and which epoch it is.

        Args:
            limit: Called when an epoch begins: no more batches are loaded ahead; infinity for all. With
                ``persistent_workers`` it lets a thread take the batches. ``None`` takes it back.
            is_owner: Whether it is the Trainer that asks for an iterator. While it uses one, others get an iterator
                beside it; ``None`` for a loader whose latest iterator is the one in use, whoever asks.
            epoch: Called when an epoch begins: its number, which sample seeds follow from; ``None`` counts the passes.
        """
        self._limit: Callable[[], float] | None = limit
        self._is_owner: Callable[[], bool] | None = is_owner
        self._epoch: Callable[[], int] | None = epoch

    def _settle_threads(self) -> None:
        """Leave one thread where several cannot load the samples, and warn once with the reason."""
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
        if not isinstance(self._epochs, IndexEpochs) or not self._epochs.skips:
            return f"{type(self).__name__} does not load by torch's own iterator"
        if not self._auto_collation:
            return "batch_size=None makes no batches, whose samples could be shared out among threads"
        if has_whole_batches(self):
            return f"the batches of a {type(self.dataset).__name__} are made by one index, without its samples"
        if loads_batches(self.dataset):
            return f"{type(self.dataset).__name__} loads a batch in one call, by its __getitems__"
        return ""

    def _state_to_load(self) -> Any:
        """The state that the next epoch begins with: one that was loaded, until a batch was returned after it."""
        return self._loaded if self._position is None or self._position.is_untouched else None

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iterator is, counted in batches that were returned.

        An ``EpochState`` as a dictionary: the count and, over a dataset with indices, the states of the random
        generators from which the order follows and, for the epoch after it, of those that belong to the loader and its
        samplers. Over a stream the states of the global RNGs at its beginning and, if it has an exact state of its own,
        that in each process that reads it. Without worker processes, those of the generators that the dataset holds.
        With a class behind this one that keeps its own state, that after the latest batch. Random numbers that worker
        processes draw for augmentation are part of it over such a stream alone; with ``sample_seeds`` they need not be.

        Warns:
            TurboWarning: If the dataset holds a generator in worker processes whose state is not saved.
        """
        state = self.epoch_state()
        if not isinstance(state, EpochState):
            return state
        if self._state_to_load() is None:
            self._warn_of_generators(state)
        return state.to_dict()

    def epoch_state(self) -> Any:
        """Return what ``state_dict`` is made of: an ``EpochState``, or the state of a class that keeps its own."""
        assert self._epochs is not None
        loaded = self._state_to_load()
        return self._epochs.describe(self, self._position) if loaded is None else loaded

    def state_before(self, unused: int) -> dict[str, Any]:
        """Return what ``state_dict`` gave before the latest batches, of a loader whose class keeps a state of its own.

        Args:
            unused: How many batches were returned and not used, as those that a Trainer has fetched ahead; 2 at most.
        """
        assert isinstance(self._epochs, OwnStateEpochs)
        return self._epochs.describe(self, self._position, unused)

    def _warn_of_generators(self, state: EpochState) -> None:
        """Warn of generators that the dataset holds in each worker process; those of new processes begin again."""
        lost = self.num_workers and (self.persistent_workers or not state.over)
        stream = None if state.over else state.stream
        if stream is not None and (stream.places or not self.persistent_workers):
            return  # the processes return their states, or new ones draw from them as the first ones did
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

        A dataset with indices is not asked for what was consumed; an ``IterableDataset`` without a state of its own is
        run through it, and so is a loader whose class has an ``__iter__`` of its own. That ``iter()`` leaves the global
        RNGs as they are.

        Args:
            state_dict: What ``state_dict`` returned, for a loader with the same dataset and samplers.

        Raises:
            ValueError: If it is the state of another kind of loader.

        Warns:
            TurboWarning: If the state is of the middle of an epoch, and the loader has another length now, or worker
                processes return batches as they are ready (``in_order=False``).
        """
        if EpochState.is_one(state_dict) != self.counts_batches:
            raise ValueError(
                f"A state with the keys {sorted(state_dict)} does not belong to {type(self).__name__}. Load the state "
                "that the same class of loader gave over the same kind of dataset."
            )
        state: Any = state_dict
        if self.counts_batches:
            state = self._reshard(EpochState.from_dict(state_dict))
        self.close()
        self._position = None
        self._loaded = state

    def load_epoch_state(self, state: EpochState) -> None:
        """Do what ``load_state_dict`` does with a state that is one of this loader already."""
        self.close()
        self._position = None
        self._loaded = state

    def may_begin_with(self, state: Any) -> bool:
        """Whether the next epoch can begin with the state of a whole one of a loader that may have been another."""
        assert self._epochs is not None
        return self._epochs.may_begin_with(self, state)

    def _reshard(self, state: EpochState) -> EpochState:
        """Return a state of a loader with other ranks, batches or processes as one of this loader, as far as it goes.

        Warn if the number of batches does not determine which samples were used.
        """
        assert self._epochs is not None
        state = self._epochs.reshard(self, state)
        if not state.consumed or state.over:
            return state
        before, now = state.length, length_of(self)
        why = []
        if self.num_workers and not getattr(self, "in_order", True):
            why.append("in_order=False returns batches as they are ready. Leave in_order=False out to go on exactly.")
        # The length of an order of samples is compared already. Nothing but this is known of a stream.
        if before is not None and before != now and state.shards is None:
            why.append(
                f"The loader had {before} batches then and has {'no length' if now is None else now} now. Go on with "
                "the same dataset, batch_size and number of ranks, or from a checkpoint of a whole epoch."
            )
        for reason in why:
            warnings.warn(
                f"The state says that {state.consumed} batches of this epoch were used, but not which ones: samples "
                f"may be missing or repeated. {reason}",
                TurboWarning,
                stacklevel=3,
            )
        return state

    def _close_iterator(self, because: str) -> None:
        live = None if self._live is None else self._live()
        if live is not None:
            live.close(because)
        elif self._background is not None:
            self._background.close()

    def close(self) -> None:
        """End the current iterator, its thread and all worker processes, persistent ones too. May be called twice."""
        self._close_iterator("its loader was closed")
        workers, self._iterator = self._iterator, None
        end_workers(workers)

    def __getstate__(self) -> dict[str, Any]:
        # What is under way stays with this loader; a copy begins where it would.
        own = {"_epochs", "_position", "_live", "_background", "_threaded", "_lists"}
        own |= {"_limit", "_is_owner", "_epoch", "_made_of"}
        state = {name: value for name, value in vars(self).items() if name not in own}
        return {**state, "_iterator": None, "_loaded": self._state_to_load()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # By their names, as DataLoader lets nobody set some of them.
        vars(self).update(state)
        self._reset_epochs(state["_loaded"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        behind = getattr(type(self), "_behind_class", None)
        if behind is None:
            return super().__reduce_ex__(protocol)
        return blank, (PrefetchLoader, behind), self.__getstate__()


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
    # By its name, as DataLoader lets nobody set it once it is made.
    vars(twin)["persistent_workers"] = stays and number > 0
    twin.num_workers = number
    return twin


def _leave(
    workers: Any, threaded: ThreadedDataset | None, put_back: Callable[[Position], None] | None, position: Position
) -> None:
    """Let go of an iterator: end its processes and threads, and put back what its sampler drew ahead."""
    end_workers(workers)
    if threaded is not None:
        threaded.close()
    if put_back is not None:
        put_back(position)


def prefetching(cls: type[DataLoader[Any]]) -> type[PrefetchLoader[Any]]:
    """Return a class that inherits from ``PrefetchLoader`` and ``cls`` and takes the arguments of both."""
    if issubclass(cls, PrefetchLoader):
        return cls
    return PrefetchLoader if cls is DataLoader else make_class(PrefetchLoader, cls)


PrefetchLoader.__init__.__signature__ = merge_signatures(PrefetchLoader, DataLoader)
