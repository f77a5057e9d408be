"""amp with DistributedDataParallel: two gloo ranks on one CPU."""

import contextlib
import socket
import warnings

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_turbo import amp
from lightning_turbo.errors import AmpUsageError, TurboWarning

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


def seeded_apart(rank, level, before):
    """Trains an encoder and a decoder that every rank draws anew, and returns masters and weights after each step."""
    torch.manual_seed(rank)
    models = [nn.Linear(4, 8), nn.Linear(8, 2)]
    start = [p.detach().clone() for model in models for p in model.parameters()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    amp.initialize(models, optimizers, opt_level=level, dtype=torch.bfloat16, loss_scale=8.0, verbosity=0)
    encoder, decoder = before(models[0]), before(models[1])
    with torch.no_grad():
        encoder(torch.ones(1, 4))  # by itself, before the first pass
    seen = []
    for i in range(3):
        x = torch.randn(3, 4)
        for last in (False, True):
            apart = () if last else (encoder.no_sync(), decoder.no_sync())
            with contextlib.ExitStack() as stack:
                for context in apart:
                    stack.enter_context(context)
                loss = decoder(encoder(x)).float().pow(2).mean()
                with amp.scale_loss(loss, optimizers, delay_unscale=not last) as scaled:
                    scaled.backward()
        for optimizer in optimizers[: 1 if i == 0 else 2]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        masters = [p.detach().clone() for optimizer in optimizers for p in amp.master_params(optimizer)]
        seen.append((masters, [p.detach().clone() for model in models for p in model.parameters()]))
    hooks = [len(model._forward_pre_hooks) for model in models]
    amp.shutdown()
    return start, seen, hooks


def stepped_early(rank):
    """Trains two layers at O2 from seeds per rank; the second steps once before it had a pass of its own."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    amp.initialize(model, optimizers, opt_level="O2", dtype=torch.bfloat16, loss_scale=8.0, verbosity=0)
    wrapped = DistributedDataParallel(model)
    for i in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(wrapped(torch.randn(3, 4)).float().square().mean(), optimizers[: i + 1]) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
    masters = [p.detach().clone() for optimizer in optimizers for p in amp.master_params(optimizer)]
    amp.shutdown()
    return masters


def accumulated(rank, level, delayed, released=False):
    """Two passes under ``no_sync`` and one that DDP synchronises; returns the gradients and the warnings."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, dtype=torch.float16, verbosity=0)
    wrapped = DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * i + rank))
            with contextlib.nullcontext() if i == 2 else wrapped.no_sync():
                loss = wrapped(x).float().square().mean() / 3
                with amp.scale_loss(loss, optimizer, delay_unscale=delayed and i < 2) as scaled:
                    scaled.backward()
            if released and i < 2:
                optimizer.zero_grad(set_to_none=True)
    gradients = [p.grad.clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    said = [(str(w.message), w.filename) for w in caught if issubclass(w.category, TurboWarning)]
    return gradients, said


def work(rank, folder, port):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
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
    result["apart"] = {level: seeded_apart(rank, level, DistributedDataParallel) for level in LEVELS}
    result["early"] = stepped_early(rank)
    for level in LEVELS:
        result["accumulated", level] = [
            accumulated(rank, level, delayed, released)
            for delayed, released in ((True, False), (False, False), (False, True))
        ]
    torch.save(result, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The batches, and what the two ranks made of them."""
    tmp_path = tmp_path_factory.mktemp("ranks")
    batches = [torch.randn(6, 4) for _ in range(4)]
    torch.save(batches, tmp_path / "batches.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.start_processes(work, (tmp_path, port), nprocs=2, join=False, start_method="spawn")
    while not context.join(timeout=100):
        pass
    return batches, *(torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_with_seeds_of_their_own_begin_with_the_first_ones_weights(ranks, level):
    (start, first, hooks), (other, second, _) = (results["apart"][level] for results in ranks[1:])
    assert not torch.equal(start[0], other[0])
    for ours, theirs in zip(first, second, strict=True):
        for a, b in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
            assert torch.equal(a, b)
    if level == "O2":
        # The decoder has not stepped after the first pass, and the first rank's masters are exact.
        assert all(torch.equal(a, b) for a, b in zip(second[0][0][2:], start[2:], strict=True))
        assert hooks == [1, 1]  # of O2's casts alone


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ddp_averages_delayed_gradients_and_leaves_others_apart(ranks, level):
    delayed, undelayed, released = zip(*(results["accumulated", level] for results in ranks[1:]), strict=True)
    alike = [
        all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        for (first, _), (second, _) in (delayed, undelayed, released)
    ]
    assert alike == [True, False, True]


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_levels_without_scaling_need_no_delay(ranks, level):
    for first, second in zip(*(results["accumulated", level] for results in ranks[1:]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
        assert first[1] == second[1] == []


def test_a_step_without_gradients_keeps_no_weights_apart(ranks):
    _, first, second = ranks
    assert all(torch.equal(a, b) for a, b in zip(first["early"], second["early"], strict=True))


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
        assert "wrapped in DistributedDataParallel: expected the model itself" in first[level + " wrapped"]
