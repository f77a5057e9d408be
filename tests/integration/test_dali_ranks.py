"""Gloo ranks: shards, lengths and resuming under a Trainer with DDP, and tensor-parallel peers."""

import os

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_turbo import DALILoader
from lightning_turbo.data.dali import ImageFolder
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


class Peer(LightningModule):
    """Its layer is whole on each tensor-parallel peer, and each data-parallel rank has a loader of its own."""

    def __init__(self, photos):
        super().__init__()
        self.photos, self.seen = photos, []

    def configure_model(self):
        self.layer = torch.nn.Linear(3, 1)

    def train_dataloader(self):
        self.loader = DALILoader(ImageFolder(self.photos, train=False, size=8, mean=[0.0] * 3, std=[1.0] * 3), 4)
        return self.loader

    def training_step(self, batch, index):
        means = batch[0].float().mean((2, 3))
        self.seen += [round(each, 3) for each in means[:, 0].tolist()]
        self.ranks = sorted(self.loader.state_dict()["pipelines"])
        return self.layer(means).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_peers(photos, folder):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    model = Peer(photos)
    Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, barebones=True).fit(model)
    torch.save({"seen": model.seen, "ranks": model.ranks}, folder / os.environ["RANK"])


def test_tensor_parallel_peers_are_given_the_same_images(tmp_path):
    run_ranks(fit_peers, make_photos(tmp_path / "photos", per_class=8), tmp_path, ranks=4)
    runs = [torch.load(tmp_path / str(rank)) for rank in range(4)]
    assert runs[0]["seen"] == runs[1]["seen"] != runs[2]["seen"] == runs[3]["seen"]
    assert [run["ranks"] for run in runs] == [[0, 1]] * 4, "a state holds the pipelines of all data-parallel ranks"
