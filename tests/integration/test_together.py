"""All techniques together: a run that stops and goes on equals one that never stopped; two ranks agree."""

import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from tests.ranks import run_ranks
from tests.registry import BY_NAME, TECHNIQUES, run
from tests.versions import unpickling

LEVELS = ("O0", "O1", "O2", "O3")
WORKER = Path(__file__).with_name("pairs_worker.py")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode"),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning"),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.TurboWarning"),
]


class SaveAfterFirstEpoch(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint("first.ckpt")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("left_out", ["effective_batch_size", "exact_accumulation"])
def test_stop_save_load_and_go_on_equals_never_having_stopped(level, left_out, tmp_path, capsys):
    # EffectiveBatchSize sets the accumulation that ExactAccumulation is given otherwise; each is tried.
    techniques = [t for t in TECHNIQUES if t.name not in (left_out, "doctor")]
    _, straight = run(pl, level, techniques, epochs=3, callbacks=[SaveAfterFirstEpoch()])
    _, resumed = run(pl, level, techniques, epochs=3, fit={"ckpt_path": "first.ckpt", **unpickling(True)})
    assert resumed.losses == straight.losses[5:]
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def launch(folder, which):
    run_ranks(WORKER, folder, which, timeout=900)
    names = sorted({path.name[:-2] for path in folder.iterdir()})
    for name in names:
        ranks = [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in (0, 1)]
        assert all(math.isfinite(loss) for rank in ranks for loss in rank["losses"]), name
        for key, value in ranks[0]["module"].items():
            if "running" not in key:  # each rank sees its own batches
                assert torch.equal(value, ranks[1]["module"][key]), (name, key)
    return names


@pytest.mark.distributed
def test_all_together_on_two_ranks(tmp_path):
    assert len(launch(tmp_path, "all")) == len(LEVELS)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1000)
def test_every_two_together_on_two_ranks(tmp_path):
    assert len(launch(tmp_path, "pairs")) == len(LEVELS) * len(BY_NAME) * (len(BY_NAME) - 1) // 2
