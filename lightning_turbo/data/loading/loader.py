"""``PrefetchLoader``, the DataLoader that keeps some batches ahead."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo._checks import check_count, expect
from lightning_turbo._random import generators_in, same_random_numbers
from lightning_turbo.data.loading.ahead import starting_workers
from lightning_turbo.data.loading.epoch import Epoch, EpochProgress
from lightning_turbo.data.loading.order import Order, generators_of
from lightning_turbo.data.loading.prefetcher import Profile
from lightning_turbo.data.loading.shares import Shares, check_fits
from lightning_turbo.data.loading.state import (
    check_version,
    goes_on,
    is_counted,
    reshard,
    state_of,
    state_of_new,
    warn_of_last_pass,
)
from lightning_turbo.data.loading.streams import has_exact_state, warn_of_lost_samples
from lightning_turbo.data.loading.subclass import blank, copy_loader, make_class, merge_signatures, refuse_added
from lightning_turbo.data.loading.threads import Draws, ThreadedDataset
from lightning_turbo.data.loading.torch_side import SmallTensors, end_workers, length_of, preload
from lightning_turbo.data.loading.whole_batches import WholeBatches, as_it_is, has_whole_batches, is_quiet
from lightning_turbo.data.sample_seeds import SeededCollate, SeededDataset, check_seed, check_seeds, loads_batches
from lightning_turbo.errors import NoEffectWarning

__all__ = [
    "DEPTH", "PrefetchLoader", "copy_loader", "prefetching", "seed_samples",
]  # fmt: skip

DEPTH = 8
T = TypeVar("T", covariant=True)


class PrefetchLoader(DataLoader[T]):
    """A ``torch.utils.data.DataLoader`` whose next batches are prepared ahead, and which resumes in mid-epoch.

    Takes the arguments of ``DataLoader`` and is one in every respect; the batches and their order are the same, bit
    for bit. Without worker processes a background thread prepares the next batches; worker processes do so by
    themselves. To add it to another kind of loader, inherit this class in front of it (``class Mine(PrefetchLoader,
    StatefulDataLoader)``), or call ``PrefetchLoader.of(loader)``.

    ``iter()`` draws what torch draws there, and nothing is loaded before the first ``next()``: worker processes start
    then. Several iterators may be in use beside one another. The thread and the worker processes end when the iterator
    is exhausted, dropped or closed, and when the interpreter ends. Dataset code of all loaders runs in one of these
    threads at a time; the calling thread must not use a dataset meanwhile that a thread reads.

    Args:
        *args: As in ``DataLoader``.
        prefetch_batches: How many batches the thread keeps ready, 1 or more; one more is in preparation. The default of
            8 serves loads of uneven duration; less saves memory. Worker processes have ``prefetch_factor``.
        threads: How many threads load the samples of a batch at the same time, 1 or more: in this process, or in each
            worker process. For loads that wait, or compute outside the GIL, and a dataset whose ``__getitem__`` may be
            called by several threads at once. If the first batch draws random numbers, one thread loads all, as their
            numbers would depend on timing otherwise.
        transfer: What moves the batches to a device as they are returned; a ``DeviceTransfer``.
        sample_seeds: A seed from which, with the epoch and the index of a sample, all random numbers follow that are
            drawn while it is loaded; see ``seed_samples``, to which it leads. Batches are then loaded by worker
            processes, or by the calling thread alone.
        **kwargs: As in ``DataLoader``.

    Raises:
        TypeError: If ``prefetch_batches``, ``threads`` or ``sample_seeds`` is not an integer, or the dataset is a
            loader or, with ``sample_seeds``, an ``IterableDataset``.
        ValueError: If ``prefetch_batches`` or ``threads`` is below 1, or ``sample_seeds`` is out of range.

    Warns:
        NoEffectWarning: If a thread would gain something, but loading, or what is done with a batch, draws from the
            global RNGs, or from a generator that the dataset holds; batches are then loaded in the calling thread,
            because the numbers would depend on timing otherwise. If ``threads`` cannot be used: with an
            ``IterableDataset``, ``sample_seeds``, batches that are not made of samples, or a class behind this one that
            loads by itself.
        TurboWarning: If a global RNG changes while a thread loads ahead, with the number of the batch.

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
        super().__init__(*args, **kwargs)
        if isinstance(self.dataset, DataLoader):
            raise TypeError(
                f"expected a dataset, got the loader {self.dataset!r}. Pass its dataset, or call "
                "PrefetchLoader.of(loader) to add prefetching to it."
            )
        self._begin_prefetching(prefetch_batches, threads, transfer, sample_seeds)

    def _begin_prefetching(self, prefetch_batches: int, threads: int, transfer: Any, sample_seeds: Any) -> None:
        self.prefetch_batches = check_count("prefetch_batches", prefetch_batches)
        self.threads = check_count("threads", threads)
        self._draws = Draws()
        self.transfer = transfer
        self.sample_seeds = sample_seeds if sample_seeds is None else check_seed(sample_seeds, "sample_seeds")
        self._is_twin = False  # made by ``of``
        self._reset(None)
        if sample_seeds is not None:
            check_seeds(self.dataset)
            self._check_is_torchs()
        check_fits(self)

    def _check_is_torchs(self) -> None:
        if self.iterates:
            raise TypeError(
                f"sample_seeds: expected a loader that loads by torch's own iterator, got {type(self).__name__}, whose "
                "class has an __iter__ of its own. Pass a DataLoader: a PrefetchLoader goes on in mid-epoch by itself."
            )

    def _reset(self, loaded: Any, number: int = 0) -> None:
        """Set what a loader knows of its passes to that of one that was not iterated.

        Args:
            loaded: The state that the next pass begins with, if there is one.
            number: The number of the next pass.
        """
        self.loaded = loaded  # until a pass has begun there
        self.asked: EpochProgress | None = None  # of the pass that was asked for a batch last
        # The passes since a state was loaded that are in use, and the latest; who was begun or asked last comes last.
        self.passes: list[tuple[weakref.ref[Epoch], EpochProgress]] = []
        self._earlier: list[weakref.ref[Epoch]] = []  # passes before that, which may be in use still
        self.next_number = number  # of the next pass, if nothing else tells it
        self.has_seeded_workers = False  # those that stay, which are seeded at the first iter() alone
        self._order: Order | None = None
        self._has_warned_of_lost = False
        self._pool: ThreadedDataset | None = None  # of the iterator that is being made
        self.profile = Profile(is_quiet(self))
        self.limit_batches(None)

    # Of which kind it is

    @property
    def keeps_state(self) -> bool:
        """Whether the class behind this one keeps a state of its own, which is given as it is."""
        return hasattr(super(), "state_dict")

    @property
    def iterates(self) -> bool:
        """Whether the class behind this one has an ``__iter__`` of its own."""
        return super().__iter__.__func__ is not DataLoader.__iter__

    @property
    def is_stream(self) -> bool:
        """Whether it loads a stream."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def asks_stream(self) -> bool:
        """Whether the stream is asked for its state: torch's own iterator reads it in this process."""
        return self.is_stream and not self.num_workers and not self.iterates and has_exact_state(self.dataset)

    @property
    def was_plain(self) -> bool:
        """Whether the loader that ``of`` made this one of has no state of its own."""
        return self._is_twin and not self.keeps_state

    @property
    def drawn_ahead(self) -> int:
        """How many entries torch draws for worker processes before it returns a batch."""
        return (self.prefetch_factor or 0) * self.num_workers

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        *,
        prefetch_batches: int = DEPTH,
        threads: int = 1,
        transfer: Any = None,
        sample_seeds: int | None = None,
    ) -> PrefetchLoader[Any]:
        """Return a loader like ``loader``, of a class that inherits from its class, with prefetching added.

        Dataset, samplers and every attribute are shared; ``loader`` itself is not changed.

        Args:
            loader: A ``DataLoader`` of any class.
            prefetch_batches: How many batches to keep ready, 1 or more.
            threads: How many threads load samples at the same time, 1 or more.
            transfer: What moves the batches to a device as they are returned.
            sample_seeds: As in ``PrefetchLoader``; ``None`` for those of ``loader``, if it has some.

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
        seeds = getattr(loader, "sample_seeds", None) if sample_seeds is None else sample_seeds
        twin._begin_prefetching(prefetch_batches, threads, transfer, seeds)
        # Some classes end in __del__ what a copy shares, such as one iterator for all epochs.
        twin._made_of = loader
        twin._is_twin = True
        return twin

    # A pass

    def __iter__(self) -> Iterator[T]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._settle_threads()
        epoch = Epoch(self)
        # Those that are in use, and the latest: its progress is the loader's state when it is gone.
        self.passes = [each for each in self.passes if each[0]() is not None or each is self.passes[-1]]
        self.passes.append((weakref.ref(epoch), epoch.progress))
        return epoch

    def notice(self, epoch: Epoch) -> None:
        """Remember which pass was asked for a batch last."""
        before = self.asked if epoch.progress.is_untouched else None
        if before is not None and self.is_stream and not (self._has_warned_of_lost or self._is_in_use(before)):
            self._has_warned_of_lost = warn_of_lost_samples(self, before)
        self.asked = epoch.progress
        others = [each for each in self.passes if each[1] is not epoch.progress]
        self.passes = [*others, (weakref.ref(epoch), epoch.progress)]

    @property
    def _index_sampler(self) -> Any:
        """The sampler whose entries are loaded, in an ``Order``."""
        sampler = super()._index_sampler
        # DataLoader asks for it in its constructor.
        order = vars(self).get("_order")
        if order is None or order.sampler is not sampler:
            return sampler
        return order

    def make_order(self) -> Order:
        """Return the ``Order`` around the sampler. Another one is set by who makes a loader's samplers again."""
        sampler = super()._index_sampler
        if self._order is None or self._order.sampler is not sampler:
            self._order = Order(sampler, generators_of(self.generator, sampler))
        if self.is_stream:  # it draws from what it holds, which may be other generators in each epoch
            held = [] if self.num_workers else generators_in(self.dataset)
            self._order.generators = [*generators_of(self.generator, sampler), *held]
        return self._order

    def shares(self) -> Shares:
        """Return how the samples are shared over the ranks of now, and in batches."""
        return Shares(self.make_order())

    def number_pass(self, state: Any) -> int:
        """Return the number of the epoch that begins with a state, from which sample seeds follow."""
        if self._epoch is not None:
            return self._epoch()
        if state is not None and goes_on(state):
            return state["epoch"]
        if self._order is not None and self._order.epoch is not None:
            return self._order.epoch
        return self.next_number if state is None or not is_counted(state) else state["epoch"] + state["over"]

    def most_ahead(self) -> float:
        """Return how many batches of an epoch may be loaded ahead.

        The end is not asked for, at which some samplers draw once more: a Trainer does not ask for it. Where the order
        follows from a generator that the loader or a sampler holds, the last batch is left out too. A sampler that is
        asked to fill it has met its end, and an epoch that is broken off before would change the order of the next.
        """
        length = self.length()
        if length is not None and self.make_order().generators:
            length -= 1
        return min(inf if length is None else length, inf if self._limit is None else self._limit())

    def _is_in_use(self, progress: EpochProgress) -> bool:
        """Whether the pass with this progress may be asked for further batches."""
        epochs = [each() for each, its in self.passes if its is progress]
        return any(epoch is not None and not epoch.is_over for epoch in epochs)

    def _are_in_use(self) -> bool:
        """Whether another pass is using the worker processes that stay."""
        alive = self._alive()
        return any(self.is_kept(epoch.source) and not epoch.is_over for epoch in alive)

    def _alive(self) -> list[Epoch]:
        """Return the passes that are in use."""
        passes = [*self._earlier, *(each for each, _ in self.passes)]
        return [epoch for each in passes if (epoch := each()) is not None]

    def is_kept(self, source: Any) -> bool:
        """Whether the worker processes of an iterator stay for the next pass."""
        return source is not None and source is self._iterator

    def make_source(self, pins: bool = False) -> Iterator[Any]:
        """Return torch's iterator over the batches, or that of the class behind this one.

        Args:
            pins: Whether torch is to pin the batches, for copies to a device beside the steps.
        """
        behind: Any = super()
        preload(self)
        with starting_workers() if self.num_workers else contextlib.nullcontext():
            if self.iterates:
                return behind.__iter__()
            with _standing_in(self, self._stand_ins(pins)):
                # Processes that stay belong to one pass at a time.
                return self._get_iterator() if self._are_in_use() else behind.__iter__()

    def _stand_ins(self, pins: bool) -> dict[str, Any]:
        """Return what torch's iterator is to find in place of the loader's own attributes."""
        given: dict[str, Any] = {}
        self._pool = None
        if self.sample_seeds is not None:
            given["dataset"] = SeededDataset(self.dataset, self.sample_seeds)
            given["collate_fn"] = SeededCollate(self.collate_fn, self.sample_seeds)
        elif has_whole_batches(self):
            given = {"dataset": WholeBatches(self.dataset), "collate_fn": as_it_is}
        elif self.threads > 1:
            self._pool = given["dataset"] = ThreadedDataset(self.dataset, self.threads, self._draws)
        if self.num_workers:
            given["worker_init_fn"] = SmallTensors(self.worker_init_fn)
        if pins:
            given["pin_memory"] = True  # by torch's own thread, where processes load
        return given

    def take_pool(self) -> ThreadedDataset | None:
        """Return the threads of the iterator that was just made, which the pass ends."""
        pool, self._pool = self._pool, None
        return pool

    def limit_batches(self, limit: Callable[[], float] | None, epoch: Callable[[], int] | None = None) -> None:
        """Follow a Trainer, which knows how many batches it takes, and which epoch it is.

        Args:
            limit: Called when an epoch begins: no more batches are loaded ahead; infinity for all. ``None`` takes it
                back.
            epoch: Called when an epoch begins: its number, which sample seeds follow from; ``None`` counts the passes.
        """
        self._limit: Callable[[], float] | None = limit
        self._epoch: Callable[[], int] | None = epoch

    def _settle_threads(self) -> None:
        """Leave one thread where several cannot load the samples, and warn once with the reason."""
        why = "" if self.threads == 1 else self._why_one_thread()
        if why:
            warnings.warn(
                f"threads={self.threads} has no effect here: {why}. Leave it out, or use a dataset with indices.",
                NoEffectWarning,
                stacklevel=3,
            )
            self.threads = 1

    def _why_one_thread(self) -> str:
        if self.sample_seeds is not None:
            return "the generators that are seeded for each sample belong to the process, and all of its threads"
        if self.is_stream:
            return f"the dataset is an IterableDataset ({type(self.dataset).__name__}), which one thread runs through"
        if self.iterates:
            return f"{type(self).__name__} does not load by torch's own iterator"
        if not self._auto_collation:
            return "batch_size=None makes no batches, whose samples could be shared out among threads"
        if has_whole_batches(self):
            return f"the batches of a {type(self.dataset).__name__} are made by one index, without its samples"
        if loads_batches(self.dataset):
            return f"{type(self.dataset).__name__} loads a batch in one call, by its __getitems__"
        return ""

    # States

    def state_dict(self) -> Any:
        """Return where the pass is that was begun or asked for a batch last, counted in batches that were returned.

        If that was dropped before its end, as after a look at a batch, it is the one that was asked before it and is
        still in use. The state is a dictionary of plain Python objects and tensors: the count, the states of the random
        generators from which the order follows and, for the epoch after it, of those that belong to the loader and its
        samplers. Without worker processes, those of the generators that the dataset holds; over a stream that has an
        exact state of its own, that too. With a class behind this one that keeps its own state, that after the latest
        batch. Random numbers that worker processes draw for augmentation are no part of it; with ``sample_seeds`` they
        need not be.

        Warns:
            TurboWarning: If the dataset holds a generator in worker processes whose state is not saved, or a stream has
                a state of its own there.
        """
        progress = self._current()
        if progress is None:
            return self._new() if self.loaded is None else self.loaded
        state = self.describe(progress)
        if not self.keeps_state and not self.is_stream and not self.num_workers and state["over"]:
            # A Trainer that knows the length does not ask for the end, and saves the state of its Epoch.
            state["end_follows"] = not progress.ended and bool(state["start"])
        return state

    def _current(self) -> EpochProgress | None:
        """Return the progress of the pass whose state is the loader's."""
        known = [(each(), progress) for each, progress in self.passes]
        if not known:
            return None
        epoch, newest = known[-1]
        live = [progress for each, progress in known if each is not None and not each.is_over]
        is_dropped = epoch is None and not self.is_over(newest)
        return live[-1] if is_dropped and live else newest

    def is_over(self, progress: EpochProgress) -> bool:
        """Whether all batches of a pass were returned."""
        return progress.ended or progress.consumed == self.length()

    def length(self) -> int | None:
        """Return the number of batches of a pass; ``None`` if it is not known."""
        with same_random_numbers():  # a sampler may draw random numbers to compute its length
            return length_of(self)

    def _new(self) -> Any:
        """Return the state of a loader that was not iterated."""
        behind: Any = super()
        return behind.state_dict() if self.keeps_state else state_of_new(self)

    def state_of_next(self, again: bool) -> dict[str, Any]:
        """Return a state with which the pass after the latest one begins.

        Args:
            again: Whether that is the latest one itself, from its beginning.
        """
        progress = self._current()
        if progress is None or not progress.start:
            # A Trainer restores the global RNGs, from which it will be drawn.
            return {**(self._new() if self.loaded is None else self.loaded), "before_order": None}
        state = {**self.describe(progress), "over": True, "before_order": None}
        if again:
            begun = progress.start["begun"]
            state.update(epoch=progress.number - 1, generators=begun["own"], samplers=begun["samplers"], held=[])
            if progress.seeds_kept_workers:  # as the first pass of a loader does, which follows no other
                state.update(over=False, start={}, epoch=progress.number)
        return state

    def random_at_start(self) -> dict[str, Any]:
        """Return the global RNGs at the beginning of the latest pass; nothing before one."""
        progress = self._current()
        return {} if progress is None or not progress.start else progress.start["begun"]["shared"]

    def may_begin_with(self, state: Any) -> bool:
        """Whether the next pass can begin with the state of a whole one of a loader that may have been another."""
        return is_counted(state) and len(state["generators"]) in (0, len(self.make_order().generators))

    def count_from(self, number: int, ended: bool) -> None:
        """Count the used samples of a resharded epoch that was loaded as so many batches.

        Args:
            number: The number of batches.
            ended: Whether no batches are left.
        """
        state: dict[str, Any] = self.loaded  # which a pass may have already
        state.update(consumed=number, from_batch=number)
        if ended:
            state["from_sample"] = state["order"]["length"]

    def describe(self, progress: EpochProgress, unused: int = 0) -> Any:
        """Return the state of a pass.

        Args:
            progress: Its progress.
            unused: How many batches were returned and not used; 2 at most.
        """
        if progress.is_untouched and goes_on(progress.state):
            return progress.state
        if unused > progress.consumed:
            warn_of_last_pass(unused - progress.consumed)
        consumed = max(0, progress.consumed - unused)
        if self.keeps_state:
            states = [state for number, state in progress.states if number <= consumed]
            return states[-1] if states else progress.states[-1][1]
        return state_of(self, progress, consumed, unused)

    def load_state_dict(self, state_dict: Any) -> None:
        """Store a state: the next pass that begins goes on where it was taken.

        A dataset with indices is not asked for what was consumed; an ``IterableDataset`` without a state of its own is
        run through it, and so is a loader whose class has an ``__iter__`` of its own. The global RNGs stay as they are.

        Args:
            state_dict: What ``state_dict`` returned, for a loader with the same dataset and samplers.

        Raises:
            ValueError: If it is the state of another kind of loader.

        Warns:
            TurboWarning: If the state is of the middle of an epoch, and the loader has another length now, or worker
                processes return batches as they are ready (``in_order=False``).
        """
        if self.keeps_state == is_counted(state_dict):
            raise ValueError(
                f"A state with the keys {sorted(state_dict)} does not belong to {type(self).__name__}. Load the state "
                "that the same class of loader gave over the same kind of dataset."
            )
        if not self.keeps_state:
            check_version(state_dict)
        self.loaded = state_dict if self.keeps_state else reshard(self, state_dict)
        self._earlier = [each for each, _ in self.passes if each() is not None]
        self.passes = []
        self.asked = None
        self.has_seeded_workers = self._iterator is not None

    def load_behind(self, state: Any) -> None:
        """Load a state into the class behind this one."""
        super().load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]

    def ask_behind(self, source: Any) -> Any:
        """Return a copy of the state of the class behind this one."""
        ask = getattr(source, "state_dict", None) or super().state_dict  # pyright: ignore[reportAttributeAccessIssue]
        return copy.deepcopy(ask())

    def close(self) -> None:
        """End all iterators, their threads and all worker processes, persistent ones too. May be called twice."""
        for epoch in self._alive():
            epoch.close("its loader was closed")
        workers, self._iterator = self._iterator, None
        self.has_seeded_workers = False
        end_workers(workers)

    def __getstate__(self) -> dict[str, Any]:
        # What is under way stays with this loader; a copy begins where it would.
        own = {"asked", "passes", "_earlier", "_order", "_pool", "profile", "_limit", "_epoch", "_made_of"}
        state = {name: value for name, value in vars(self).items() if name not in own}
        current = self._current()
        is_begun = current is not None and not current.is_untouched
        return {**state, "_iterator": None, "loaded": None if is_begun else self.loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # By their names, as DataLoader lets nobody set some of them.
        vars(self).update(state)
        self._reset(state["loaded"], state["next_number"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        behind = getattr(type(self), "_behind_class", None)
        if behind is None:
            return super().__reduce_ex__(protocol)
        return blank, (PrefetchLoader, behind), self.__getstate__()


@contextlib.contextmanager
def _standing_in(loader: Any, given: dict[str, Any]) -> Iterator[None]:
    """Give a loader other attributes for the length of the block."""
    own = {name: getattr(loader, name) for name in given}
    # By their names, as DataLoader lets nobody set some of them.
    vars(loader).update(given)
    try:
        yield
    finally:
        vars(loader).update(own)


def prefetching(cls: type[DataLoader[Any]]) -> type[PrefetchLoader[Any]]:
    """Return a class that inherits from ``PrefetchLoader`` and ``cls`` and takes the arguments of both."""
    if issubclass(cls, PrefetchLoader):
        return cls
    return PrefetchLoader if cls is DataLoader else make_class(PrefetchLoader, cls)


def seed_samples(loader: DataLoader[Any], seed: int) -> PrefetchLoader[Any]:
    """Return a loader like ``loader`` whose random numbers belong to the samples, whichever process loads them.

    Before a sample is loaded, the generators of torch (CPU), Python and NumPy in that process are seeded from ``seed``,
    the epoch and the index of the sample; before ``collate_fn`` is called, from ``seed``, the epoch and the number of
    the batch. So is what the dataset and its transforms hold: generators of the three, and objects with a method
    ``set_random_seed(seed)``, as the transforms of Albumentations 2, or ``set_random_state(seed=)``, as MONAI's.
    Augmentation is then the same for any ``num_workers`` and start method, and after a restart. In the training process
    the generators of the process are put back afterwards.

    The epoch is that of the sampler if it has ``set_epoch`` and ``epoch``, as ``DistributedSampler`` has; Lightning
    sets it. With other samplers each pass is one epoch, counted from 0.

    Args:
        loader: A ``DataLoader`` of any class, over a dataset with ``__getitem__``. It is not changed; its dataset and
            samplers are shared.
        seed: An integer from 0 to ``2**32 - 1``.

    Returns:
        A ``PrefetchLoader`` that inherits from the class of ``loader``, with ``sample_seeds=seed``.

    Raises:
        TypeError: If ``loader`` is not a ``DataLoader`` or has an ``IterableDataset``, or ``seed`` is not an integer;
            while it is iterated, if the sampler yields something else than indices, or a ``set_random_state`` takes no
            ``seed``.
        ValueError: If ``seed`` is out of range.

    Note:
        A dataset with ``__getitems__`` loads a batch in one call: its numbers follow from the index of the first
        sample, and so from the batches too, unless it calls ``seed_sample(index)`` before it draws for a sample, as
        ``PatchDataset`` does. CUDA's generators are not seeded.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> class Noise(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return torch.rand(1)
        >>> alone, batched = (seed_samples(DataLoader(Noise(), batch_size=size), seed=1) for size in (1, 4))
        >>> torch.equal(torch.cat(list(alone)), next(iter(batched)))
        True

    Source: The keys of Grain and of JAX's random numbers; ``set_rnd`` in ``monai.data.utils``.
    """
    expect(isinstance(loader, DataLoader), "loader", loader, "a torch.utils.data.DataLoader", TypeError)
    return PrefetchLoader.of(
        loader,
        prefetch_batches=getattr(loader, "prefetch_batches", DEPTH),
        threads=getattr(loader, "threads", 1),
        transfer=getattr(loader, "transfer", None),
        sample_seeds=check_seed(seed),
    )


PrefetchLoader.__init__.__signature__ = merge_signatures(PrefetchLoader, DataLoader)
