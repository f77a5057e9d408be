"""What a measured run leaves out: it writes nothing into the user's folders, and a script can read all of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lightning_turbo._lightning import DummyLogger
from lightning_turbo._replaced import ReplacedMethod

__all__ = ["Muted", "SilentLogger"]

# Loggers that write into a folder, which is another one here; and those that write nothing here by themselves.
FOLDERS = {"CSVLogger", "TensorBoardLogger"}
HARMLESS = {"DummyLogger", "WandbLogger"}  # the runner's WANDB_MODE disables the second one
# Loggers whose names and versions are asked for at a server, or make an entry there.
REMOTE = {"CometLogger", "LitLogger", "MLFlowLogger", "NeptuneLogger"}
# Callbacks, by the name of their class or of one that it inherits: the method of each that searches, writes files, or
# ends the training.
METHODS = {
    "BatchSizeFinder": "scale_batch_size",
    "LearningRateFinder": "lr_find",
    "ModelCheckpoint": "_link_checkpoint",
    "Timer": "_check_time_remaining",  # its end would be that of each epoch from there on
}


class SilentLogger(DummyLogger):
    """In the place of a logger that writes somewhere: it takes every call, and has the names and settings of the other.

    Args:
        original: The logger of the script.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original
        self._is_remote = bool(_names(original) & REMOTE)

    @property
    def name(self) -> Any:
        """Of the logger of the script, unless a server would have to be asked."""
        return "muted" if self._is_remote else self.original.name

    @property
    def version(self) -> Any:
        """Of the logger of the script, unless a server would have to be asked."""
        return "muted" if self._is_remote else self.original.version

    @property
    def save_dir(self) -> Any:
        """Of the logger of the script."""
        return self.original.save_dir

    @property
    def log_dir(self) -> Any:
        """Of the logger of the script."""
        return None if self._is_remote else self.original.log_dir

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the logger of the script; for anything else a function that does nothing."""
        settings = vars(self).get("original")
        return vars(settings)[name] if settings is not None and name in vars(settings) else super().__getattr__(name)


class Muted:
    """Keeps a run from writing files, while all that a script can read of its Trainer stays.

    Loggers that write files do so in a temporary folder; other loggers have a ``SilentLogger`` in their place.
    Callbacks stay: what they save with the Trainer is not written, finders find nothing, bars draw nothing. The probe
    of a Trainer makes one, and it lasts as long as the process.

    Args:
        folder: For the files of loggers; whoever starts the process removes it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.unwritten: list[str] = []  # paths of checkpoints that the script may look for
        self.silent: list[str] = []  # classes of loggers with another one in their place

    def mute(self, trainer: Any) -> None:
        """Mute a Trainer that begins to run."""
        ReplacedMethod(trainer.strategy, "save_checkpoint", self._save)
        ReplacedMethod(trainer.strategy, "remove_checkpoint", lambda remove, filepath: None)
        trainer.loggers = [self._redirect(each, number) for number, each in enumerate(trainer.loggers)]
        for callback in trainer.callbacks:
            _mute_callback(callback)

    def explain(self, error: BaseException) -> str:
        """Return what was muted over which a script tripped; nothing if the error is another one."""
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
        """Return the logger itself, with another folder, or the one in its place."""
        names = _names(logger)
        if names & FOLDERS:
            # The object stays the one that the script may hold; an experiment that it has used already goes on.
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
        callback._max_depth = 0  # it counts and prints nothing
    if "SaveConfigCallback" in names:
        callback.already_saved = True
    if "ProgressBar" in names:
        with contextlib.suppress(NotImplementedError):  # of a bar that cannot be disabled
            callback.disable()
