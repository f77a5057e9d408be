"""Two gloo ranks: shards, lengths and resuming under a Trainer with DDP."""

import os
import warnings
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp

from tests.dali_samples import make_photos

pytestmark = pytest.mark.distributed
COUNT = 27  # no multiple of two ranks


def worker(rank, root, folder):
    """Fit with DDP, keep a checkpoint of mid-epoch, and fit again from it."""
    from tests.integration.test_dali_trainer import Save, fit

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for name, more in (("whole", {"callbacks": [Save(folder / "kept", 6)]}), ("rest", {"ckpt_path": folder / "kept"})):
        model, trainer, _ = fit(root, devices=2, strategy="ddp", max_epochs=3, **more)
        weights = model.layer.weight.detach().clone()
        run = {"train": model.trained, "val": model.validated, "steps": trainer.global_step, "weights": weights}
        torch.save(run, folder / f"{name}.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def numbers(runs, part, epoch, start=0):
    return sorted(n for run in runs for e, _, batch, _ in run[part][start:] for n in batch if e == epoch)


def test_under_ddp_every_epoch_covers_the_data_and_a_resumed_run_equals_the_whole_one(tmp_path):
    mp.spawn(worker, args=(make_photos(tmp_path / "photos", per_class=COUNT // 3), tmp_path), nprocs=2)
    whole, rest = ([torch.load(tmp_path / f"{name}.{rank}") for rank in (0, 1)] for name in ("whole", "rest"))
    assert [run["steps"] for run in whole] == [12, 12]
    for epoch in range(3):
        assert numbers(whole, "train", epoch) == list(range(COUNT))
        assert numbers(whole, "val", epoch, start=2) == list(range(COUNT))
    assert torch.equal(whole[0]["weights"], whole[1]["weights"])
    for run, resumed in zip(whole, rest, strict=True):
        assert resumed["train"] == run["train"][6:]
        assert torch.equal(resumed["weights"], run["weights"])
