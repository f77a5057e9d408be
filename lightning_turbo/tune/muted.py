"""Mutes a measured run: it writes nothing into the user's folders, but a script can read everything."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lightning_turbo._lightning import DummyLogger
from lightning_turbo._replaced import ReplacedMethod

__all__ = ["Muted", "SilentLogger"]

# Loggers that write into a folder, which is redirected; and loggers that write nothing by themselves.
FOLDERS = {"CSVLogger", "TensorBoardLogger"}
HARMLESS = {"DummyLogger", "WandbLogger"}  # WANDB_MODE, set by the runner, disables the latter
# Loggers that ask a server for names and versions, or create an entry there.
REMOTE = {"CometLogger", "LitLogger", "MLFlowLogger", "NeptuneLogger"}
# Callbacks, by the name of their class or a base class -> their method that searches, writes files, or ends training.
METHODS = {
    "BatchSizeFinder": "scale_batch_size",
    "LearningRateFinder": "lr_find",
    "ModelCheckpoint": "_link_checkpoint",
    "Timer": "_check_time_remaining",  # once over, it would end every further epoch
}


class SilentLogger(DummyLogger):
    """Replaces a logger that writes somewhere: accepts every call, with the names and settings of the original.

    Args:
        original: The script's logger.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original
        self._is_remote = bool(_names(original) & REMOTE)

    @property
    def name(self) -> Any:
        """Name of the script's logger, unless that would contact a server."""
        return "muted" if self._is_remote else self.original.name

    @property
    def version(self) -> Any:
        """Version of the script's logger, unless that would contact a server."""
        return "muted" if self._is_remote else self.original.version

    @property
    def save_dir(self) -> Any:
        """Folder of the script's logger."""
        return self.original.save_dir

    @property
    def log_dir(self) -> Any:
        """Log folder of the script's logger, unless it is remote."""
        return None if self._is_remote else self.original.log_dir

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the script's logger, or for anything else a function that does nothing."""
        settings = vars(self).get("original")
        return vars(settings)[name] if settings is not None and name in vars(settings) else super().__getattr__(name)


class Muted:
    """Keeps a run from writing files, while everything that a script can read from its Trainer stays.

    Loggers that write files use a temporary folder; other loggers are replaced with a ``SilentLogger``. Callbacks stay,
    but what they save through the Trainer is not written, finders find nothing, and progress bars draw nothing. The
    probe of a Trainer creates it; it lasts as long as the process.

    Args:
        folder: Folder for the files of loggers; whoever starts the process removes it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.unwritten: list[str] = []  # paths of checkpoints that the script may look for
        self.silent: list[str] = []  # classes of replaced loggers

    def mute(self, trainer: Any) -> None:
        """Mute a Trainer that starts to run."""
        ReplacedMethod(trainer.strategy, "save_checkpoint", self._save)
        ReplacedMethod(trainer.strategy, "remove_checkpoint", lambda remove, filepath: None)
        trainer.loggers = [self._redirect(each, number) for number, each in enumerate(trainer.loggers)]
        for callback in trainer.callbacks:
            _mute_callback(callback)

    def explain(self, error: BaseException) -> str:
        """Return which muted part made a script fail; empty if the error has another cause."""
        text = str(error)
        for path in self.unwritten:
            if Path(path).name in text:
                return f"tune writes no checkpoint, and the script reads {path}"
        if self.silent and SilentLogger.__name__ in text:
            return f"tune has another logger in the place of {' and '.join(self.silent)}"
        return ""

    def _save(self, save: Any, checkpoint: Any, filepath: Any, *args: Any, **options: Any) -> None:
        self.unwritten.append(str(filepath))

    def _redirect(self, logger: Any, number: int) -> Any:
        """Return the logger itself, redirected if necessary, or its replacement."""
        names = _names(logger)
        if names & FOLDERS:
            # The script may hold a reference to the logger, so it stays; an experiment that it already uses continues.
            folder = str(Path(self.folder, f"logger {number}"))
            for name in ("_root_dir", "_save_dir"):
                if name in vars(logger):
                    setattr(logger, name, folder)
            logger._experiment = None
            return logger
        if names & HARMLESS:
            return logger
        self.silent.append(type(logger).__name__)
        return SilentLogger(logger)


def _names(thing: Any) -> set[str]:
    return {kind.__name__ for kind in type(thing).__mro__}


def _mute_callback(callback: Any) -> None:
    names = _names(callback)
    for kind, method in METHODS.items():
        if kind in names:
            ReplacedMethod(callback, method, lambda replaced, *args, **options: None)
    if "ModelSummary" in names:
        callback._max_depth = 0  # counts nothing and prints nothing
    if "SaveConfigCallback" in names:
        callback.already_saved = True
    if "ProgressBar" in names:
        with contextlib.suppress(NotImplementedError):  # for a bar that cannot be disabled
            callback.disable()
