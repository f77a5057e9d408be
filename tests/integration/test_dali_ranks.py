"""Two gloo ranks: shards, lengths and resuming under a Trainer with DDP."""

import os
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.dali_samples import make_photos

pytestmark = pytest.mark.distributed
COUNT = 27  # no multiple of two ranks


def under_the_trainer(root, folder):
    """Fit with DDP, keep a checkpoint of mid-epoch, and fit again from it."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_turbo import DALIDataModule

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3 * 8 * 8, 3)
            self.train_trace, self.val_trace = [], []

        def training_step(self, batch, batch_idx):
            images, labels, numbers = batch
            self.train_trace.append((self.current_epoch, batch_idx, numbers.tolist(), float(images.double().sum())))
            return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

        def validation_step(self, batch, batch_idx):
            self.val_trace.append((self.current_epoch, batch[2].tolist()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    class Keep(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 1):
                trainer.save_checkpoint(folder / "kept.ckpt")

    def fit(ckpt_path=None):
        torch.manual_seed(0)
        model = Model()
        data = DALIDataModule(
            root, root, batch_size=4, num_threads=1, seed=3, images={"size": 8, "index": True}
        )  # fmt: skip
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=2,
            callbacks=[] if ckpt_path else [Keep()],
        )  # fmt: skip
        trainer.fit(model, data, ckpt_path=ckpt_path)
        weights = model.layer.weight.detach().clone()
        return {"train": model.train_trace, "val": model.val_trace, "steps": trainer.global_step, "weights": weights}

    return {"whole": fit(), "resumed": fit(folder / "kept.ckpt")}


def worker(rank, root, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    torch.save(under_the_trainer(root, Path(folder)), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    root = make_photos(tmp_path_factory.mktemp("photos"), per_class=COUNT // 3)
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(root), str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_under_ddp_every_epoch_covers_the_data_and_steps_agree(ranks):
    runs = [rank["whole"] for rank in ranks]
    assert [run["steps"] for run in runs] == [12, 12]
    for epoch in range(3):
        numbers = [n for run in runs for e, _, batch, _ in run["train"] for n in batch if e == epoch]
        assert sorted(numbers) == list(range(COUNT))
        shown = [n for run in runs for e, batch in run["val"][2:] for n in batch if e == epoch]
        assert sorted(shown) == list(range(COUNT))
    assert torch.equal(runs[0]["weights"], runs[1]["weights"])


def test_under_ddp_a_resumed_run_equals_the_whole_one(ranks):
    for rank in ranks:
        whole, resumed = rank["whole"], rank["resumed"]
        assert resumed["train"] == [entry for entry in whole["train"] if entry[:2] > (1, 1)]
        assert torch.equal(resumed["weights"], whole["weights"])
