"""Promises that do not hold yet, each with the part of the package that is to mend it."""

import warnings

import numpy as np
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_turbo import Doctor, PackedDataset
from lightning_turbo.data import pack_folder

nibabel = pytest.importorskip("nibabel")


def write_scan(path, value, shape=(6, 7, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.full(shape, value, np.int16), np.eye(4)), path)


@pytest.mark.parametrize(
    "series",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.xfail(strict=True, raises=FileNotFoundError, reason="packed: layouts are guessed"),
        ),
    ],
)
def test_acdc_is_packed_as_it_is_distributed(series, tmp_path):
    for number in (1, 2):
        name = f"patient{number:03}"
        for frame in ("01", "12"):
            write_scan(tmp_path / "acdc" / name / f"{name}_frame{frame}.nii.gz", 10 * number)
            write_scan(tmp_path / "acdc" / name / f"{name}_frame{frame}_gt.nii.gz", number)
        if series:
            write_scan(tmp_path / "acdc" / name / f"{name}_4d.nii.gz", 99, (6, 7, 8, 3))
    pack_folder(tmp_path / "acdc", tmp_path / "packed")
    data = PackedDataset(tmp_path / "packed")
    assert len(data) == 4
    for number in range(4):
        scan, label = data[number]
        np.testing.assert_array_equal(np.asarray(scan), 10 * np.asarray(label))


@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="packed: layouts are guessed")
def test_a_folder_of_each_case_is_not_packed_as_a_class(tmp_path):
    for number in (1, 2):
        for name, value in (("T1", 100), ("aseg", number)):
            write_scan(tmp_path / "subjects" / f"s{number}" / f"{name}.nii.gz", value)
    with pytest.raises(ValueError, match="aseg"):
        pack_folder(tmp_path / "subjects", tmp_path / "packed")


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
