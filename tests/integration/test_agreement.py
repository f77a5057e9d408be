"""Ranks that disagree on their settings are refused before the first step, with the values of both."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_turbo import TurboDDPStrategy
from lightning_turbo.strategies.turbo_ddp import compare_settings, read_settings
from tests.ranks import run_ranks

WORKER = Path(__file__).with_name("agreement_worker.py")


def test_what_differs_is_named_with_each_value_and_its_ranks():
    same = {"opt_level": "'O1'", "max_epochs": "3"}
    assert compare_settings([same] * 3) == []
    assert compare_settings([same, {**same, "opt_level": "'O2'"}, same]) == [
        "opt_level: 'O1' on ranks 0, 2, 'O2' on rank 1"
    ]
    assert compare_settings([same, {"max_epochs": "3"}]) == ["opt_level: 'O1' on rank 0, not set on rank 1"]
    (many,) = compare_settings([*[{"torch": "'2.12'"}] * 10, {"torch": "'2.13'"}])
    assert many == "torch: '2.12' on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more, '2.13' on rank 10"


def test_an_object_of_the_same_kind_is_the_same_setting():
    """A process group has another address on every rank."""
    settings = []
    for group in (object(), object()):
        trainer = pl.Trainer(accelerator="cpu", strategy=TurboDDPStrategy(process_group=group), logger=False)
        trainer.strategy.connect(BoringModel())
        settings.append(read_settings(trainer.strategy, trainer))
    assert compare_settings(settings) == []
    assert "'process_group': <object object>" in settings[0]["ddp_kwargs"]


@pytest.mark.distributed
def test_two_ranks_that_disagree_are_refused_before_the_first_step(tmp_path):
    run_ranks(WORKER, tmp_path)
    said = {}
    for path in tmp_path.iterdir():
        case, rank, steps = path.name.split(".")
        assert steps == "0", path  # no step was made
        said.setdefault(case, {})[rank] = path.read_text()
    for case, text in {
        "level": "settings: precision: 'bf16-mixed' on rank 0, 'bf16-true' on rank 1; opt_level: 'O1' on rank 0, 'O2'",
        "scale": "settings: loss_scale: 128.0 on rank 0, 256.0 on rank 1. Start every",
        "trainer": "settings: accumulate_grad_batches: 1 on rank 0, 2 on rank 1; max_epochs: 1 on rank 0, 2 on rank 1.",
        "strategy": "settings: grad_compression: None on rank 0, 'fp16' on rank 1; ddp_kwargs: {",
        "network": "settings: parameters: (2, 15) on rank 0, (2, 20) on rank 1. Start",
        "checkpoint": "settings: checkpoint to resume from: 'one.ckpt' on rank 0, None on rank 1. Start",
    }.items():
        assert text in said[case]["0"]
        assert said[case]["0"] == said[case]["1"]
