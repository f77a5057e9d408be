"""Promises that do not hold yet, each with the part of the package that is to mend it."""

import warnings

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_turbo import Doctor


def slow():
    total = 0
    for number in range(300_000):
        total += number * number
    return total


class Slow(BoringModel):
    def training_step(self, batch, batch_idx):
        slow()
        return super().training_step(batch, batch_idx)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="Doctor: no line is named where Python itself computes")
def test_the_doctor_names_the_line_that_computes(tmp_path):
    doctor = Doctor(warmup=2, timed=5, watched=3)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[doctor],
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Slow())
    sites = [place.site for finding in doctor.report.findings for place in finding.places if place.site]
    assert {site.function for site in sites} & {"slow", "training_step"}
