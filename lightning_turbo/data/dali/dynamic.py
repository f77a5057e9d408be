"""``DynamicPipeline``: a reader of DALI's dynamic mode and the processing of its batches, for a ``DALILoader``."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import Tensor

from lightning_turbo import _optional
from lightning_turbo._checks import check_functions, expect
from lightning_turbo.data.dali.pipelines import (
    Built,
    Placement,
    Settings,
    check_reader,
    draw_seed,
    own_arguments,
)

__all__ = ["BuiltDynamic", "DynamicPipeline"]


class DynamicPipeline:
    """A reader of DALI's dynamic mode, and the function that processes its output into batches.

    Pass it to ``DALILoader`` or ``DALIDataModule`` instead of a pipeline function. ``process`` may use every operator
    of ``nvidia.dali.experimental.dynamic`` and any Python code.

    Args:
        reader: A function that creates a reader with ``pad_last_batch=True`` and ``enable_checkpointing=True``. If it
            has parameters named ``shard_id``, ``num_shards``, ``device`` or ``order_seed``, the loader passes them.
        process: A function of the reader's outputs that returns one DALI batch, or a tuple of several; ``None`` uses
            the outputs unchanged. If it has parameters named ``device`` (``"cpu"`` or ``"gpu"``) or ``rng``, the loader
            passes them. Random operators draw from ``rng``, whose state is part of the loader's state.
        pad: Whether to pad samples of different shapes to the largest one in the batch; otherwise they raise an error.

    Raises:
        MissingExtraError: If DALI is not installed, or its version lacks the dynamic mode (before 2.2).
        TypeError: If ``reader`` or ``process`` is not a function.

    Example:
        >>> import nvidia.dali.experimental.dynamic as ndd  # doctest: +SKIP
        >>> def read(shard_id, num_shards, order_seed):  # doctest: +SKIP
        ...     shard = {"shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
        ...     return ndd.readers.File(
        ...         file_root="images", random_shuffle=True, seed=order_seed, enable_checkpointing=True, **shard
        ...     )
        >>> def process(encoded, label, device, rng):  # doctest: +SKIP
        ...     images = ndd.decoders.image(encoded, device="mixed" if device == "gpu" else "cpu")
        ...     return ndd.random_resized_crop(images, size=(224, 224), rng=rng), label
        >>> loader = DALILoader(DynamicPipeline(read, process), batch_size=32)  # doctest: +SKIP

    Source: NVIDIA DALI 2.4, dynamic mode and its checkpointing.
    """

    def __init__(
        self, reader: Callable[..., Any], process: Callable[..., Any] | None = None, *, pad: bool = False
    ) -> None:
        _optional.require("nvidia.dali", "DynamicPipeline")
        check_functions(reader=reader, process=process)
        expect(reader is not None, "reader", reader, "a function that creates a reader", TypeError)
        self.reader = reader
        self.process = process
        self.pad = pad


# The contexts in use, by number of threads and device.
_contexts: weakref.WeakValueDictionary[tuple[int, int | None], Any] = weakref.WeakValueDictionary()


def _context(num_threads: int, device_id: int | None) -> Any:
    """Return the context of readers and operators, shared by all loaders with this number of threads and device.

    A reader leaves its context entered between two batches, and contexts must be exited in reverse order. With a shared
    context, two loaders can be read alternately. Its thread ends with the last loader that uses it.
    """
    import nvidia.dali.experimental.dynamic as ndd

    context = _contexts.get((num_threads, device_id))
    if context is None:
        context = _contexts[num_threads, device_id] = ndd.EvalContext(num_threads=num_threads, device_id=device_id)
    return context


class BuiltDynamic(Built):
    """A reader of DALI's dynamic mode. It repeats its shard endlessly, so that the batches of an epoch are counted."""

    def __init__(
        self,
        pipeline: DynamicPipeline,
        settings: Settings,
        placement: Placement,
        num_threads: int,
        seed: int,
        epoch: int,
        saved: Mapping[str, Any],
    ) -> None:
        import nvidia.dali.experimental.dynamic as ndd

        self._pipeline = pipeline
        self._context = _context(num_threads, placement.device_id)
        self._rng = ndd.random.RNG(seed=draw_seed(seed, epoch, placement.rank + 1))
        given = own_arguments(pipeline.reader, settings, placement, seed, epoch)
        # After its metadata was read, a reader reads batches of one sample, so a separate reader is used for that.
        reader = pipeline.reader(**given)
        kind = "a reader of nvidia.dali.experimental.dynamic.readers"
        expect(hasattr(reader, "get_metadata"), "what reader returned", reader, kind, TypeError)
        super().__init__(reader.get_metadata(), settings, placement, epoch, saved)
        check_reader("of the DynamicPipeline", self._meta, placement, self.samples)
        self._reader = pipeline.reader(**given)
        self._batches: Generator[Any] = (nothing for nothing in ())
        if saved["checkpoint"] is not None:
            reader_state, rng_state = saved["checkpoint"]
            self._reader.set_state(reader_state)
            self._rng.set_state(rng_state)

    def _read(self) -> list[Tensor]:
        with self._context:
            outputs = self._made_of(self._next())
            if not self.taken:
                self._reader.get_state()  # raises now, not at the first checkpoint, if the reader has no state
            return [output.torch(pad=self._pipeline.pad) for output in outputs]

    def _next(self) -> Any:
        """Read a batch. At the end of a pass, the reader starts the next one, at a position that DALI tracks."""
        with contextlib.suppress(StopIteration):
            return next(self._batches)
        self._batches = self._reader.next_epoch(batch_size=self.settings.batch_size)
        return next(self._batches)

    def _made_of(self, read: Any) -> tuple[Any, ...]:
        named = isinstance(read, Mapping)
        process = self._pipeline.process
        if process is None:
            return tuple(read.values()) if named else read
        known = inspect.signature(process).parameters
        device = "cpu" if self.placement.device_id is None else "gpu"
        own = {name: value for name, value in {"device": device, "rng": self._rng}.items() if name in known}
        made = process(**read, **own) if named else process(*read, **own)
        outputs = made if isinstance(made, tuple) else (made,)
        for output in outputs:
            kind = "a batch of DALI's dynamic mode, or several in a tuple"
            expect(hasattr(output, "torch"), "what process returned", output, kind, TypeError)
        return outputs

    def _rewind(self) -> None:
        # Dropped batches are read as well, so that the reader completes its pass.
        with self._context:
            for _ in range(self.taken, self.read_in_an_epoch):
                self._next()

    def _checkpoint(self) -> Any:
        started = self.taken or self.passes
        return (str(self._reader.get_state()), str(self._rng.get_state())) if started else None

    def close(self) -> None:
        """Abort the reader's current pass."""
        self._batches.close()
