"""Progress of the demo: one bar for the whole run in a terminal, one line per epoch elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_turbo._lightning import Callback, LightningModule, Trainer

__all__ = ["RunProgress"]


class RunProgress(Callback):
    """Show the progress of the run. All Trainers of the demo share one object.

    Args:
        console: Output. Without a terminal, plain lines are written, so that logs stay readable.
        steps: Training batches of the whole run, over all levels.
        done: Batches of an earlier run that is resumed.

    Note:
        Use it as a context manager: a thread draws the bar, and ends at the end of the context.
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
        """Show the next level and epoch, where 1 is the first epoch."""
        self._epoch = f"{level}  epoch {epoch:>2}/{epochs}"
        self._bar.update(self._task, description=self._epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar, without synchronisation."""
        self._bar.advance(self._task)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the epoch's validation accuracy."""
        score = f"validation accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}"
        self._bar.update(self._task, score=score)
        if not self.console.is_terminal:
            self.console.print(f"{self._epoch}  {score}", highlight=False)
