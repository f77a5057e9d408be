"""``DevicePrefetcher``, the copy of the next batches to the device on a side stream."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo.data.background import BackgroundIterator
from lightning_turbo.data.loader import PrefetchLoader
from lightning_turbo.data.randomness import LoadWatch
from lightning_turbo.data.resume import IndexTape, Place, length_of, warn_of_gaps
from lightning_turbo.data.torch_iterators import copied, guarded
from lightning_turbo.data.transfer import MIN_BYTES, DeviceIterator, DeviceTransfer, Foreground

__all__ = ["DevicePrefetcher"]


class DevicePrefetcher:
    """Iterate over a loader with the next batches on the device already.

    While a step works on one batch, the next ones are copied on a second CUDA stream from pinned memory. The stream
    of the step waits for the copy, and the memory of a batch is not used again before the step is through with it.
    A loader that has no background thread of its own gets one, with the rules of ``PrefetchLoader``. On a CPU device
    this object hands out the loader's batches and does nothing else.

    Args:
        loader: Any iterable of batches that can be iterated again: ``DataLoader``, ``PrefetchLoader``, a list.
        device: ``"cpu"``, or a CUDA device.
        prefetch_batches: How many batches to keep on the device beyond the one in use, 1 or more. They take memory
            there.
        min_bytes: Batches smaller than this are copied on the step's own stream, in bytes, 0 or more; with a
            ``transform`` or ``transfer``, which may keep something on the device, until a larger one has come.
        transform: Called on each batch on the device, on the side stream; for example ``Normalize``. On a CPU device
            it is called too.
        transfer: Called as ``transfer(batch, device)`` in place of the built-in move, on the side stream.

    Raises:
        TypeError: If ``loader`` cannot be iterated, or an argument has a wrong type.
        ValueError: If an argument is out of range, or the device is none that can be used.

    Note:
        ``transform`` and ``transfer`` run in the thread that asks for batches. One that draws random numbers runs
        when its batch's turn comes, so that results are those of a loop without prefetching.

    Example:
        >>> batches = [torch.ones(2), torch.zeros(2)]
        >>> [b.tolist() for b in DevicePrefetcher(batches, "cpu", transform=lambda b: b + 1)]
        [[2.0, 2.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int,
        *,
        prefetch_batches: int = 2,
        min_bytes: int = MIN_BYTES,
        transform: Callable[[Any], Any] | None = None,
        transfer: Callable[[Any, torch.device], Any] | None = None,
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(
                f"DevicePrefetcher got {loader!r} as loader, which cannot be iterated: it has no __iter__. "
                "Pass a DataLoader or another iterable of batches."
            )
        self.loader = loader
        self.transfer = DeviceTransfer(
            device, prefetch_batches=prefetch_batches, min_bytes=min_bytes, transform=transform, transfer=transfer
        )
        self._watch = LoadWatch()
        self._live: weakref.ref[Any] | None = None
        self._place: Place | None = None
        self._work: Any = None
        self._tape: IndexTape | None = None
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        live = self._current()
        if live is not None:
            if live.park() and self._tape is not None:
                self._tape.put_back(self._tape.place)
        elif self._work is not None:
            self._work.wait()
        skip, self._skip = self._skip, 0
        with self._lent():
            source: Any = guarded(iter(self.loader))
        position = getattr(self.loader, "state_dict", None)
        plain = self.transfer.transform is None and self.transfer.transfer is None
        ours = isinstance(source, DeviceIterator) and source.transfer is self.transfer
        if ours or (plain and (isinstance(source, DeviceIterator) or (self.transfer.idle and position is not None))):
            self._live = self._place = None
            return source  # the loader does it all
        if skip:
            source = itertools.islice(source, skip, None)
        if not isinstance(source, BackgroundIterator):
            if self.transfer.device.type == "cpu" or isinstance(source, DeviceIterator):
                source = Foreground(source)
            else:
                source = self._ahead(source, skip, position)
                position = None
        source.place.consumed += skip
        iterator = self.transfer.iterate(source, position)
        if self._tape is not None:
            self._tape.follow(source.place, iterator.place)
        self._place = iterator.place
        self._live = weakref.ref(iterator)
        return iterator

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Let a loader with prefetching use this object's transfer, which then tells it what is handed out."""
        lends = isinstance(self.loader, PrefetchLoader) and self.loader.transfer is None
        if lends:
            vars(self.loader)["transfer"] = self.transfer
        try:
            yield
        finally:
            if lends:
                vars(self.loader)["transfer"] = None

    def _ahead(self, source: Any, skip: int, position: Callable[[], Any] | None) -> BackgroundIterator:
        """Return what takes the batches of ``source`` ahead, and no random numbers that a plain loop would not."""
        loader: Any = self.loader
        tape, place = None, Place()
        mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if mapped and position is None:
            tape, sampler = self._tape, cast(Any, loader)._index_sampler
            if tape is None or tape.sampler is not sampler:
                tape = IndexTape(sampler, loader.generator)
        self._tape = tape = tape if tape is not None and tape.own else None
        # Some samplers draw once more at their end, for which a loader with a length need not be asked.
        draws = mapped and (position is not None or (tape is not None and not loader.num_workers))
        length = length_of(loader) if draws else None
        snapshot = None if position is None else functools.partial(copied, position)
        ahead = BackgroundIterator(
            source,
            prefetch_batches=self.transfer.prefetch_batches,
            snapshot=snapshot if tape is None else tape.note,
            wanted=None if length is None else max(0, length - skip),
            dispose=None if tape is None else functools.partial(tape.put_back, place),
            watch=self._watch,
            place=place,
        )
        self._work = ahead.work
        return ahead

    def start_next_epoch(self) -> bool:
        """Begin to load the next epoch, see ``PrefetchLoader.start_next_epoch``; other loaders cannot.

        Returns:
            Whether it was begun.
        """
        start = getattr(self.loader, "start_next_epoch", None)
        with self._lent():
            begun = start is not None and start()
        if begun:
            self._place = None  # from here on the loader knows where it stands
        return begun

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType] - a TypeError where the loader has no length

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while this object is being built or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        target = self if name in _OWN else self.loader
        object.__setattr__(self, name, value) if target is self else setattr(target, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its dataset the number of the epoch, where they want to know it.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        owners = [self.loader, *(getattr(self.loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        owners = [*owners, getattr(getattr(self.loader, "batch_sampler", None), "sampler", None)]
        for owner in {id(owner): owner for owner in owners}.values():
            tell = getattr(owner, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch handed out; a count where the loader has no state."""
        place = self._place
        own = getattr(self.loader, "state_dict", None)
        if own is not None:
            return own() if place is None or place.state is None or place.ended else place.state
        if place is None:
            return {"consumed": self._skip, "whole": False}
        length = length_of(self)
        return {"consumed": place.consumed, "whole": place.ended or place.consumed == length, "length": length}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter()`` go on where ``state_dict`` was taken.

        Args:
            state_dict: What ``state_dict`` returned for a loader of the same kind. A loader without state of its own
                is run through what was consumed.

        Warns:
            TurboWarning: As ``PrefetchLoader.load_state_dict``.
        """
        self._end("its DevicePrefetcher was set to another place")
        own = getattr(self.loader, "load_state_dict", None)
        if own is not None:
            own(state_dict)
        else:
            warn_of_gaps(self.loader, state_dict)
            self._skip = 0 if state_dict.get("whole") else int(state_dict["consumed"])

    def close(self) -> None:
        """End the current iterator, and close a loader of this library. May be called twice.

        The ``close`` of another loader may be for good, and is left to whoever made it.
        """
        self._end("its DevicePrefetcher was closed")
        close: Any = getattr(self.loader, "close", None)
        if close is not None and any(
            kind.__module__.startswith("lightning_turbo.") for kind in type(self.loader).mro()
        ):
            close()

    def _end(self, because: str) -> None:
        live = self._current()
        self._live = self._place = None
        if live is not None:
            live.close(because)

    def _current(self) -> Any:
        return self._live() if self._live is not None else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_live": None, "_place": None, "_work": None, "_tape": None, "_watch": LoadWatch()}


_OWN = frozenset({"_live", "_place", "_skip", "_tape", "_watch", "_work", "loader", "transfer"})
