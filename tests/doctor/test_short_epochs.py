"""How much epochs are shortened, and which checkpoints are written meanwhile."""

from types import SimpleNamespace

import pytest

from lightning_turbo.doctor.fit_timing import Length
from lightning_turbo.doctor.short_epochs import ShortEpochs


def make_trainer(**given):
    settings = {"val_check_batch": 100, "check_val_every_n_epoch": 5, "num_val_batches": [50, 3]}
    settings |= {"val_dataloaders": [SimpleNamespace(num_workers=6)]}
    return SimpleNamespace(fit_loop=SimpleNamespace(max_batches=100), **{**settings, **given})


@pytest.mark.parametrize(("given", "expected"), [
    ({}, (8, 8, 1, [8, 3])),
    ({"val_check_batch": None}, (8, None, 1, [8, 3])),
    ({"check_val_every_n_epoch": None, "val_check_batch": 5}, (8, 5, None, [8, 3])),
    ({"val_dataloaders": None}, (8, 8, 1, [4, 3])),
])  # fmt: skip
def test_an_epoch_has_the_planned_steps_and_a_short_validation(given, expected):
    trainer = make_trainer(**given)
    ShortEpochs(trainer, 8).cut(Length(epochs=10, batches=100))
    changed = trainer.fit_loop.max_batches, trainer.val_check_batch, trainer.check_val_every_n_epoch
    assert (*changed, trainer.num_val_batches) == expected


def test_a_fit_no_longer_than_the_planned_steps_is_not_shortened_and_keeps_its_files():
    trainer = make_trainer()
    before = vars(make_trainer())
    short = ShortEpochs(trainer, 100)
    short.cut(Length(epochs=1, batches=100))
    short.end_step(99)
    short.close()
    assert vars(trainer) == before


def test_remote_checkpoints_are_not_written(tmp_path):
    written = []
    strategy = SimpleNamespace(remove_checkpoint=written.append)
    strategy.save_checkpoint = lambda state, path: written.append(path)
    short = ShortEpochs(make_trainer(strategy=strategy), 1)
    short.cut(Length(epochs=10, batches=100))
    short.end_step(0)
    try:
        strategy.save_checkpoint({"path": "s3://in the state"}, str(tmp_path / "a.ckpt"))
        strategy.save_checkpoint({}, "s3://bucket/a.ckpt")
        strategy.remove_checkpoint("s3://bucket/a.ckpt")
    finally:
        short.close()
    assert written == [str(tmp_path / "a.ckpt")]
