"""Two gloo ranks: shards, lengths and resuming, of the loader alone and under a Trainer with DDP."""

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


def trace(batches):
    """What was seen: the numbers of the files, and a sum of the pixels that random crops decide."""
    return [(numbers.tolist(), float(images.double().sum())) for images, _, numbers in batches]


def shared(state):
    """A state as rank 0 alone writes it to a checkpoint."""
    holder = [state]
    torch.distributed.broadcast_object_list(holder, src=0)
    return holder[0]


def plain(make):
    """Two epochs, and a run that is stopped in its second epoch and continued elsewhere."""
    loader, result = make(), {}
    result["length"], result["epochs"] = len(loader), [trace(loader), trace(loader)]
    batches = iter(loader)
    next(batches)
    next(batches)
    own = loader.state_dict()
    state = shared(own)
    result["same"] = own == state
    result["rest"], result["after"] = trace(batches), trace(loader)
    loader.close()
    other = make(seed=1)
    other.load_state_dict(state)
    result["resumed"], result["resumed after"] = trace(other), trace(other)
    other.close()
    return result


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
    from lightning_turbo import DALILoader
    from lightning_turbo.data.dali import ImageFolder

    recipe = ImageFolder(root, train=True, size=8, index=True)

    def ready(**kwargs):
        return DALILoader(recipe, 4, **{"num_threads": 1, "seed": 3, **kwargs})

    results = {"plain": plain(ready), "trainer": under_the_trainer(root, Path(folder))}
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    root = make_photos(tmp_path_factory.mktemp("photos"), per_class=COUNT // 3)
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(root), str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def seen(trace):
    return [n for numbers, _ in trace for n in numbers]


def test_lengths_agree_and_shards_cover_the_data(ranks):
    shards = []
    for epoch in range(2):
        epochs = [rank["plain"]["epochs"][epoch] for rank in ranks]
        assert [len(batches) for batches in epochs] == [4, 4] == [rank["plain"]["length"] for rank in ranks]
        assert sorted(seen(epochs[0]) + seen(epochs[1])) == list(range(COUNT))
        shards.append(set(seen(epochs[0])))
    assert shards[0] != shards[1]


def test_each_rank_resumes_from_the_state_of_rank_0(ranks):
    for rank in ranks:
        assert rank["plain"]["same"]
        assert len(rank["plain"]["rest"]) == 2
        assert rank["plain"]["resumed"] == rank["plain"]["rest"]
        assert rank["plain"]["resumed after"] == rank["plain"]["after"]


def test_under_ddp_every_epoch_covers_the_data_and_steps_agree(ranks):
    runs = [rank["trainer"]["whole"] for rank in ranks]
    assert [run["steps"] for run in runs] == [12, 12]
    for epoch in range(3):
        numbers = [n for run in runs for e, _, batch, _ in run["train"] for n in batch if e == epoch]
        assert sorted(numbers) == list(range(COUNT))
        shown = [n for run in runs for e, batch in run["val"][2:] for n in batch if e == epoch]
        assert sorted(shown) == list(range(COUNT))
    assert torch.equal(runs[0]["weights"], runs[1]["weights"])


def test_under_ddp_a_resumed_run_equals_the_whole_one(ranks):
    for rank in ranks:
        whole, resumed = rank["trainer"]["whole"], rank["trainer"]["resumed"]
        assert resumed["train"] == [entry for entry in whole["train"] if entry[:2] > (1, 1)]
        assert torch.equal(resumed["weights"], whole["weights"])
