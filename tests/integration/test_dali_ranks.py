"""Two gloo ranks: shards, lengths and resuming under a Trainer with DDP."""

import os

import pytest
import torch

from tests.dali_samples import make_photos
from tests.datamodules.test_dali import Save, fit
from tests.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
COUNT = 27  # not a multiple of two ranks


def fit_twice(photos, folder):
    """Fit with DDP, save a checkpoint in the middle of an epoch, and resume from it."""
    for name, more in (("whole", {"callbacks": [Save(folder / "kept", 6)]}), ("rest", {"ckpt_path": folder / "kept"})):
        model, trainer, _ = fit(photos, devices=2, strategy="ddp", max_epochs=3, **more)
        weights = model.layer.weight.detach().clone()
        run = {"train": model.trained, "val": model.validated, "steps": trainer.global_step, "weights": weights}
        torch.save(run, folder / f"{name}.{os.environ['RANK']}")


def numbers(runs, part, epoch, start=0):
    return sorted(n for run in runs for e, _, batch, _ in run[part][start:] for n in batch if e == epoch)


def test_dali_under_ddp_covers_the_data_in_every_epoch_and_resumes_exactly(tmp_path):
    run_ranks(fit_twice, make_photos(tmp_path / "photos", per_class=COUNT // 3), tmp_path)
    whole, rest = ([torch.load(tmp_path / f"{name}.{rank}") for rank in (0, 1)] for name in ("whole", "rest"))
    assert [run["steps"] for run in whole] == [12, 12]
    for epoch in range(3):
        assert numbers(whole, "train", epoch) == list(range(COUNT))
        assert numbers(whole, "val", epoch, start=2) == list(range(COUNT))
    assert torch.equal(whole[0]["weights"], whole[1]["weights"])
    for run, resumed in zip(whole, rest, strict=True):
        assert resumed["train"] == run["train"][6:]
        assert torch.equal(resumed["weights"], run["weights"])
