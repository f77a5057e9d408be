"""The demo's progress: one bar over the whole run in a terminal, one line an epoch elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_turbo._lightning import Callback, LightningModule, Trainer

__all__ = ["RunProgress"]


class RunProgress(Callback):
    """Shows how far the run is; one object serves the Trainers of all levels.

    Args:
        console: Where to write. In anything but a terminal plain lines are written, so that a log stays readable.
        steps: Training batches of the whole run, all levels together.
        done: Batches that an earlier run has done already.

    Note:
        Use it as a context manager: the bar is drawn by a thread, which ends on leaving.
    """

    def __init__(self, console: Console, *, steps: int, done: int = 0) -> None:
        self.console = console
        self._epoch = ""
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[score]}"),
            console=console,
            refresh_per_second=4,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, score="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, level: str, epoch: int, epochs: int) -> None:
        """Name the level and the epoch, counted from 1, that come next."""
        self._epoch = f"{level}  epoch {epoch:>2}/{epochs}"
        self._bar.update(self._task, description=self._epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar; nothing is fetched from the device."""
        self._bar.advance(self._task)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the epoch's validation accuracy."""
        score = f"validation accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}"
        self._bar.update(self._task, score=score)
        if not self.console.is_terminal:
            self.console.print(f"{self._epoch}  {score}", highlight=False)
