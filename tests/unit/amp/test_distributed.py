"""amp with DistributedDataParallel: two gloo ranks on one CPU."""

import contextlib

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_turbo import amp
from lightning_turbo.errors import AmpUsageError

pytestmark = pytest.mark.distributed
LEVELS = ("O0", "O1", "O2", "O3")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model, inner, batches, level):
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    amp.initialize(inner, optimizer, opt_level=level, dtype=torch.float16, loss_scale=128.0, verbosity=0)
    model = model(inner)
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    amp.shutdown()
    return [p.detach().float().clone() for p in amp.master_params(optimizer)], [p.detach() for p in inner.parameters()]


def accumulated(rank, level, delayed):
    """Two passes under ``no_sync`` and one that DDP synchronises; returns the gradients."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, dtype=torch.float16, verbosity=0)
    wrapped = DistributedDataParallel(model)
    for i in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * i + rank))
        with contextlib.nullcontext() if i == 2 else wrapped.no_sync():
            loss = wrapped(x).float().square().mean() / 3
            with amp.scale_loss(loss, optimizer, delay_unscale=delayed and i < 2) as scaled:
                scaled.backward()
    gradients = [p.grad.clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    return gradients


def work(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    result = {}
    batches = torch.load(folder / "batches.pt", weights_only=True)
    for level in LEVELS:
        own = [x[rank * 3 : rank * 3 + 3] for x in batches]
        result[level] = train(DistributedDataParallel, net(), own, level)
        wrapped = DistributedDataParallel(net())
        try:
            amp.initialize(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), opt_level=level)
            result[level + " wrapped"] = "accepted"
        except AmpUsageError as error:
            result[level + " wrapped"] = str(error)
    for level in LEVELS:
        result["accumulated", level] = [accumulated(rank, level, delayed) for delayed in (True, False)]
    torch.save(result, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The batches, and what the two ranks made of them."""
    tmp_path = tmp_path_factory.mktemp("ranks")
    batches = [torch.randn(6, 4) for _ in range(4)]
    torch.save(batches, tmp_path / "batches.pt")
    context = mp.start_processes(work, (tmp_path,), nprocs=2, join=False, start_method="spawn")
    while not context.join(timeout=100):
        pass
    return batches, *(torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_ddp_averages_delayed_gradients_and_without_a_scale_all(ranks, level):
    delayed, undelayed = zip(*(results["accumulated", level] for results in ranks[1:]), strict=True)
    alike = [
        all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) for first, second in (delayed, undelayed)
    ]
    assert alike == [True, level in ("O0", "O3")]


def test_two_ranks_wrapped_after_initialize_train_as_one(ranks):
    batches, first, second = ranks
    for level in LEVELS:
        for ours, theirs in zip(first[level], second[level], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), level
        alone, _ = train(lambda m: m, net(), batches, level)
        # Means of two half gradients against one of the joint batch: a few units of the half's last place.
        tolerance = 1e-6 if level == "O0" else 3e-3
        for a, b in zip(first[level][0], alone, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert "expected the model itself, got a DistributedDataParallel around it" in first[level + " wrapped"]
