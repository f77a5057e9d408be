"""What a measured run may write, and the explanation for a script that fails because of it."""

from types import SimpleNamespace

import pytest

from lightning_turbo._lightning import DummyLogger
from lightning_turbo.tune.muted import Muted, SilentLogger


class WandbLogger(DummyLogger):
    """Has the name of a logger that an environment variable disables."""


class MLFlowLogger:
    """Sends every request to a server."""

    save_dir = "files"

    def __getattr__(self, name):
        raise AssertionError(f"it asked a server for its {name}")


class Own:
    """A logger of the user that writes files."""

    name, version, save_dir, log_dir = "own", 3, "files", "files/own/3"

    def __init__(self):
        self.rate = 5


def mute(*loggers):
    muted = Muted("temporary")
    strategy = SimpleNamespace(save_checkpoint=lambda *args: 1 / 0, remove_checkpoint=lambda *args: 1 / 0)
    trainer = SimpleNamespace(strategy=strategy, loggers=list(loggers), callbacks=[])
    muted.mute(trainer)
    return muted, trainer


def test_a_logger_that_writes_nothing_is_not_muted():
    logger = WandbLogger()
    muted, trainer = mute(logger)
    assert trainer.loggers == [logger]
    assert muted.silent == []


@pytest.mark.parametrize(("logger", "read"), [
    (Own(), ("own", 3, "files", "files/own/3")),
    (MLFlowLogger(), ("muted", "muted", "files", None)),
], ids=["its own", "a remote one"])  # fmt: skip
def test_the_folder_of_a_muted_logger_can_be_read_without_a_server(logger, read):
    _, trainer = mute(logger)
    (silent,) = trainer.loggers
    assert (silent.name, silent.version, silent.save_dir, silent.log_dir) == read
    silent.log_image(1)


@pytest.mark.parametrize(("error", "reason"), [
    ("no file 'b.ckpt'", "tune writes no checkpoint, and the script reads folder/b.ckpt"),
    (f"{SilentLogger.__name__} has no len()", "tune has another logger in the place of Own"),
    ("division by zero", ""),
])  # fmt: skip
def test_only_errors_caused_by_muting_are_explained(error, reason):
    muted, trainer = mute(Own())
    for name in ("a", "b"):
        trainer.strategy.save_checkpoint({}, f"folder/{name}.ckpt")
    assert muted.explain(ValueError(error)) == reason
