"""The demo's progress: one bar over the whole run in a terminal, one line an epoch elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_turbo._lightning import Callback, LightningModule, Trainer

__all__ = ["RunProgress"]


class RunProgress(Callback):
    """Shows how far the run is; the same object serves the Trainer of every level.

    Args:
        console: Where to write. In anything but a terminal plain lines are written, so that a log stays readable.
        steps: Training batches of the whole run, all levels together.
        epochs: Epochs per level.

    Note:
        Use it as a context manager: the bar is drawn by a thread, which ends on leaving.
    """

    def __init__(self, console: Console, *, steps: int, epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self._level = ""
        self._score = ""
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
        self._task = self._bar.add_task("", total=steps, score="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, level: str, *, steps_done: int = 0) -> None:
        """Name the level that comes next.

        Args:
            level: One of O0 to O3.
            steps_done: Its steps that an earlier run has done already.
        """
        self._level, self._score = level, ""
        self._bar.update(self._task, advance=steps_done, description=level, score="")

    def say(self, line: str) -> None:
        """Write one line, above the bar if there is one."""
        self.console.print(line, highlight=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance the bar; nothing is fetched from the device."""
        self._bar.advance(self._task)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the epoch's validation accuracy."""
        epoch, accuracy = trainer.current_epoch + 1, float(trainer.callback_metrics["val_accuracy"])
        self._bar.update(
            self._task,
            description=f"{self._level} epoch {epoch}/{self.epochs}",
            score=f"validation accuracy {accuracy:.3f}",
        )
        if not self.console.is_terminal:
            self.say(f"{self._level}  epoch {epoch:>2}/{self.epochs}  validation accuracy {accuracy:.3f}")
