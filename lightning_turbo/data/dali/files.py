"""A ready pipeline in motion: the loader's own order of files, fed to DALI batch by batch."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

from lightning_turbo.data.dali.engine import Engine, Settings, dali
from lightning_turbo.data.dali.order import LastBatch, ShardOrder
from lightning_turbo.data.dali.recipe import FileRecipe

__all__ = ["FileStream"]


class FileStream:
    """Batches of a ``FileRecipe`` from any place on: an epoch and a batch say all there is to say.

    Args:
        recipe: Files and graph.
        settings: What the pipeline is built with.
        last_batch: ``"partial"``, ``"fill"`` or ``"drop"``.

    Raises:
        ValueError: If the files are too few for ranks and batches.
    """

    def __init__(self, recipe: FileRecipe, settings: Settings, last_batch: LastBatch) -> None:
        self.recipe, self.settings = recipe, settings
        self.order = ShardOrder(
            len(recipe.files),
            batch_size=settings.batch_size,
            rank=settings.rank,
            world_size=settings.world_size,
            shuffle=recipe.shuffle,
            last_batch=last_batch,
            seed=settings.seed,
        )
        self.samples, self.outputs = len(recipe.files), recipe.outputs
        self._epochs_differ = recipe.shuffle or recipe.random
        self._source = _Source(recipe, self.order, self._epochs_differ)
        self._engine: Engine | None = None

    def __len__(self) -> int:
        return len(self.order)

    def build(self) -> Engine:
        """Build the pipeline, unless it is built."""
        if self._engine is None:
            self._source.under_way.clear()
            self._engine = Engine(_pipeline(self.recipe, self._source, self.settings.for_pipeline()))
        return self._engine

    def start(self, epoch: int, batch: int) -> None:
        """Go to a batch of an epoch; what was prepared for another place is dropped."""
        engine, source = self.build(), self._source
        place = (epoch if self._epochs_differ else 0, batch)
        try:
            while source.under_way and source.under_way[0] != place:
                engine.discard()
                source.under_way.popleft()
        except RuntimeError:  # a dropped batch held a file that cannot be read; it is reported when it is asked for
            self.close()
            engine = self.build()
        if not source.under_way:
            source.place = place
        while len(source.under_way) < self.settings.prefetch:
            engine.schedule()

    def take(self) -> list[Tensor]:
        """Return the next batch.

        Raises:
            ValueError: If a file cannot be read or decoded; the message names it.
        """
        try:
            image, *rest = self.build().take()
        except RuntimeError as error:
            places = list(self._source.under_way)
            self.close()
            self._blame(places, error)
            raise
        self._source.under_way.popleft()
        return [self.recipe.finish(image), *rest]

    def close(self) -> None:
        """Release the pipeline with its threads and memory."""
        self._engine = None
        self._source.under_way.clear()

    def _blame(self, places: list[tuple[int, int]], error: RuntimeError) -> None:
        """Read the files of some batches one by one, and name the first that fails."""
        suspects = deque(int(number) for place in places for number in self.order.batch(*place))
        last = [0]

        def one_by_one() -> list[Any]:
            last[0] = suspects.popleft()
            return self._source.arrays(np.array(last), np.random.default_rng(0))

        alone = {**self.settings.for_pipeline(), "batch_size": 1, "prefetch_queue_depth": 1}
        engine = Engine(_pipeline(self.recipe, one_by_one, alone))
        while suspects:
            engine.schedule()
            try:
                engine.discard()
            except RuntimeError as failure:
                reason = str(failure).partition("encountered:")[2].strip().partition("\n")[0] or str(error)
                raise ValueError(
                    f"{self.recipe.files[last[0]]!r} could not be made a sample ({reason.rstrip(' :')}). "
                    "Repair the file or take it away."
                ) from error


class _Source:
    """What DALI calls for each batch: paths, labels, numbers and what the recipe draws."""

    def __init__(self, recipe: FileRecipe, order: ShardOrder, epochs_differ: bool) -> None:
        self.recipe, self.order, self.epochs_differ = recipe, order, epochs_differ
        self.place: tuple[int, int] = (0, 0)
        self.under_way: deque[tuple[int, int]] = deque()
        # DALI takes an array of equal rows far faster than a list of strings: slashes in front make them equal.
        encoded = [os.path.abspath(file).encode() for file in recipe.files]
        longest = max(map(len, encoded))
        paths = np.frombuffer(b"".join(path.rjust(longest, b"/") for path in encoded), dtype=np.uint8)
        self._paths = paths.reshape(len(encoded), longest)

    def __call__(self) -> list[Any]:
        epoch, batch = place = self.place
        last = batch + 1 == len(self.order)
        self.under_way.append(place)
        self.place = (epoch + (last and self.epochs_differ), 0 if last else batch + 1)
        # One is added because zeros at the end of a seed do not count, and the order is drawn from the first two.
        generator = np.random.default_rng([self.order.seed, epoch, self.order.rank + 1, batch + 1])
        return self.arrays(self.order.batch(epoch, batch), generator)

    def arrays(self, numbers: np.ndarray, generator: np.random.Generator) -> list[Any]:
        """Return what the pipeline's external source takes, for the files of these numbers."""
        fed: list[Any] = [self._paths[numbers]]
        if self.recipe.labels is not None:
            fed.append(self.recipe.labels[numbers])
        if self.recipe.index:
            fed.append(numbers)
        return fed + list(self.recipe.draw(generator, len(numbers)).values())


def _pipeline(recipe: FileRecipe, source: Any, arguments: dict[str, Any]) -> Any:
    """The DALI pipeline of a recipe, not yet built."""
    module = dali()
    fn = module.fn
    device = "cpu" if arguments["device_id"] is None else "gpu"
    drawn = {name: recipe.outputs + place for place, name in enumerate(recipe.draw(np.random.default_rng(0), 1))}

    @module.pipeline_def(enable_conditionals=recipe.branches)
    def graph() -> Any:
        fed = fn.external_source(source=source, num_outputs=recipe.outputs + len(drawn), batch=True)
        sample = recipe.define(
            module,
            fn.io.file.read(fed[0], dont_use_mmap=True),
            device,
            **{name: fed[place] for name, place in drawn.items()},
        )
        numbers = [number.gpu() if device == "gpu" else number for number in fed[1 : recipe.outputs]]
        return sample, *numbers

    return graph(**arguments)
