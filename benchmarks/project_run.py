"""``python -m benchmarks.project_run TASK``: one whole fit of a public project, in this process; see ``projects``.

The task is a JSON object. The program runs as Python would run it; Lightning finds the callbacks that are added here by
their entry point. What a fit took, its last score and a digest of its weights are written to a file when it ends.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_turbo._lightning import Callback
from lightning_turbo.doctor.script import run_program
from lightning_turbo.tune.probe import apply_settings, trainer_in_construction

__all__ = ["Watch", "clock", "digest", "main", "resume_from"]


def clock() -> dict[str, float]:
    """Return the processor time of this process, its threads and its children, and the time of the wall."""
    living = sum(map(_seconds_of, multiprocessing.active_children()))
    return {"processor": sum(os.times()[:4]) + living, "wall": time.perf_counter()}


def _seconds_of(child: BaseProcess) -> float:
    """Return the processor time of a child that lives, such as a worker of a loader; 0 where the system has none."""
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def digest(weights: Mapping[str, Any]) -> str:
    """Return a digest of the bytes of a ``state_dict``."""
    found = hashlib.sha256()
    for name, value in weights.items():
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Watch(Callback):
    """Times the first fit of a program and its validations, and writes what it has found; or stops the fit.

    Args:
        task: Of its keys ``"out"`` is the file to write, ``"score"`` the metric to write, ``"max_epochs"`` replaces
            that of the Trainer if it is not ``None``, and ``"stop"`` is the step after which a checkpoint is saved and
            the process ends, if it is not ``None``.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task
        self.spent = {"whole": dict.fromkeys(clock(), 0.0), "validation": dict.fromkeys(clock(), 0.0)}
        self.begun: dict[str, dict[str, float]] = {}
        self.is_over = False

    def _begin(self, part: str) -> None:
        self.begun[part] = clock()

    def _end(self, part: str) -> None:
        now, before = clock(), self.begun.pop(part)
        for name, value in now.items():
            self.spent[part][name] += value - before[name]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin the clock of the fit."""
        self.is_over = self.is_over or stage != "fit"
        if not self.is_over:
            if self.task["max_epochs"] is not None:
                trainer.fit_loop.max_epochs = self.task["max_epochs"]
            self._begin("whole")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the clock of a validation."""
        self._begin("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the clock of a validation."""
        self._end("validation")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save a checkpoint after the step where the fit is to stop, and end the process as a kill would."""
        if trainer.global_step == self.task["stop"]:
            trainer.save_checkpoint(self.task["out"])
            os._exit(0)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what the fit took and came to."""
        if self.is_over:
            return
        self.is_over = True
        self._end("whole")
        score = trainer.callback_metrics.get(self.task["score"])
        found = {
            **self.spent,
            "score": None if score is None else float(score),
            "digest": digest(pl_module.state_dict()),
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "strategy": type(trainer.strategy).__name__,
        }
        Path(self.task["out"]).write_text(json.dumps(found))


def resume_from(path: str) -> None:
    """Let each later ``fit`` of this process go on from a checkpoint: no project takes one on its command line."""
    trainer: Any = importlib.import_module(Callback.__module__.partition(".callbacks")[0]).Trainer
    fit = trainer.fit
    further: dict[str, Any] = {"ckpt_path": path}
    if "weights_only" in inspect.signature(fit).parameters:
        further["weights_only"] = False

    def resumed(self: Any, *args: Any, **kwargs: Any) -> None:
        fit(self, *args, **{**kwargs, **further})

    trainer.fit = resumed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program of a task."""
    task = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    if task["resume"] is not None:
        resume_from(task["resume"])
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    program, *argv = task["program"]
    watch = Watch(task)

    def callbacks() -> list[Callback]:
        return [*apply_settings(trainer_in_construction(), task["settings"]), watch]

    return run_program(program, argv, callbacks, module=True).status


if __name__ == "__main__":
    sys.exit(main())
