"""Two gloo ranks under ``ModelParallelStrategy``: a run that is resumed in mid-epoch equals one that never stopped."""

import os

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import Prefetch, SeededSampler
from tests.ranks import run_ranks
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.distributed
STOP = 3  # steps of 6 in each of two epochs


class Sharded(LightningModule):
    """Draws random numbers in each step, and keeps its samples. Its weights are sharded over ranks or over peers."""

    def __init__(self, peers):
        super().__init__()
        self.seen, self.peers = [], peers

    def configure_model(self):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        if self.peers == 2:
            parallel = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], parallel)
        else:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        self.seen.append(batch[1].tolist())
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(sharded, sampler, path=None, peers=1, **settings):
    """Train two epochs; return the samples of this rank and the whole weights."""
    torch.manual_seed(7 + int(os.environ["RANK"]))
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(24))
    order = {"sampler": SeededSampler(data, seed=3)} if sampler else {"shuffle": True}
    model = Sharded(peers)
    strategy = ModelParallelStrategy(2 // peers, peers, save_distributed_checkpoint=sharded)
    trainer = quiet_trainer(
        devices=2, strategy=strategy, max_epochs=2,
        callbacks=[Prefetch(), *settings.pop("callbacks", [])], **settings,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, 2, **order), ckpt_path=path, weights_only=False if path else None)
    return model.seen, [parameter.full_tensor().detach() for parameter in model.net.parameters()]


def stop_and_resume(folder, sharded, sampler):
    saves = ModelCheckpoint(folder / "saved", "stop", every_n_train_steps=STOP, save_top_k=-1)
    stopped, _ = fit(sharded, sampler, callbacks=[saves], max_steps=STOP, enable_checkpointing=True)
    torch.manual_seed(99)  # has no effect on what is resumed
    path = folder / "saved" / "stop.ckpt"
    assert path.is_dir() is sharded
    rest, resumed = fit(sharded, sampler, path=path)
    whole, weights = fit(sharded, sampler)
    assert stopped + rest == whole
    assert len(whole) == 12
    for first, second in zip(resumed, weights, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(("sharded", "sampler"), [
    (False, False), (True, True),
    pytest.param(True, False, marks=pytest.mark.slow), pytest.param(False, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_resumed_run_equals_one_that_never_stopped(sharded, sampler, tmp_path):
    run_ranks(stop_and_resume, tmp_path, sharded, sampler)


def change_peers(folder, before, after):
    """Train with so many tensor-parallel peers, and resume with others."""
    saves = ModelCheckpoint(folder / "saved", "stop", every_n_train_steps=STOP, save_top_k=-1)
    settings = {"callbacks": [saves], "max_steps": STOP, "enable_checkpointing": True}
    stopped, _ = fit(False, True, peers=before, **settings)
    rest, _ = fit(False, True, path=folder / "saved" / "stop.ckpt", peers=after)
    torch.save([stopped, rest], folder / os.environ["RANK"])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_each_sample_is_seen_once_where_data_parallel_ranks_become_peers_or_peers_such_ranks(before, after, tmp_path):
    run_ranks(change_peers, tmp_path, before, after)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    seen = []
    for run, peers in enumerate((before, after)):
        own = [[sample for batch in rank[run] for sample in batch] for rank in ranks]
        assert (own[0] == own[1]) is (peers == 2), "peers see the same samples, and other ranks others"
        seen += own[0] if peers == 2 else own[0] + own[1]
    assert sorted(seen) == sorted(2 * [*range(24)])
