"""The environment of a step on CUDA: streams of other threads, hidden tensors, global settings, torch's warnings."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import DevicePrefetcher, Doctor, drop_bias_before_norm
from lightning_turbo._lightning import LightningModule
from lightning_turbo.data import PrefetchIterator
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
newer = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 brought the second interface"
)


def test_a_loader_in_another_thread_works_on_the_stream_of_the_loop():
    own, streams = torch.cuda.Stream(), []

    def made():
        for n in range(12):
            streams.append((threading.current_thread(), torch.cuda.current_stream()))
            x = torch.zeros(1 << 22, device=CUDA)
            for _ in range(20):  # long enough that a reader on another stream would be too early
                x = x + 1
            yield x + n

    with torch.cuda.stream(own):
        sums = [batch.sum() for batch in PrefetchIterator(made())]
    own.synchronize()
    assert [float(total) for total in sums] == [(20.0 + n) * (1 << 22) for n in range(12)]
    assert {stream for _, stream in streams} == {own}
    assert len({thread for thread, _ in streams}) == 2


class Storage:
    """Holds tensors without a ``to`` method, as matrices of graph libraries do."""

    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Matrix:
    def __init__(self, x):
        self.storage = Storage(x)

    def to(self, device, non_blocking=False):
        return Matrix(self.storage.x.to(device, non_blocking=non_blocking))

    def pin_memory(self):
        return Matrix(self.storage.x.pin_memory())


def test_memory_of_hidden_tensors_is_kept_until_the_step_has_used_it():
    batches = [{"x": torch.zeros(1 << 20), "m": Matrix(torch.full((1 << 20,), float(n)))} for n in range(24)]
    slow, sums = torch.zeros(1 << 22, device=CUDA), []
    for batch in DevicePrefetcher(batches, CUDA, prefetch_batches=4):
        hidden = batch["m"].storage.x
        del batch
        for _ in range(60):  # later batches are copied before this one is read
            slow = slow * 0.5 + 1
        sums.append(hidden.sum())
        del hidden
    assert [float(total) for total in sums] == [n * float(1 << 20) for n in range(24)]


class Net(LightningModule):
    def __init__(self, in_setup=lambda: None):
        super().__init__()
        self.net, self.in_setup, self.seen = nn.Conv2d(1, 2, 3), in_setup, []

    def setup(self, stage):
        self.in_setup()

    def training_step(self, batch, batch_idx):
        self.seen.append((torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model, **settings):
    quiet_trainer(accelerator="gpu", max_epochs=1, **settings).fit(
        model, DataLoader(torch.randn(24, 1, 8, 8), batch_size=2)
    )
    return model


@pytest.mark.parametrize("deterministic", [True, "warn"])
def test_a_deterministic_run_under_turbo_stays_one(deterministic):
    before = torch.backends.cudnn.benchmark
    try:
        assert set(fit(Net(), strategy="turbo", deterministic=deterministic).seen) == {(False, True)}
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before


@newer
@pytest.mark.parametrize("settings", [
    lambda: {"strategy": "turbo"}, lambda: {"callbacks": [Doctor(warmup=1, timed=1, watched=2)]},
], ids=["turbo", "doctor"])  # fmt: skip
def test_tf32_may_be_set_by_torchs_newer_interface(settings):
    matmul = torch.backends.cuda.matmul

    def allow():
        matmul.fp32_precision = "tf32"

    try:
        fit(Net(allow), **settings())
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = "none"


def test_the_doctor_suppresses_torchs_warning_about_the_debug_mode(monkeypatch):
    doctor = Doctor(warmup=1, timed=1, watched=2)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch warns only once per process
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Synchronization debug mode")
            fit(Net(), callbacks=[doctor])
    finally:
        torch.set_warn_always(always)
    assert doctor.report.facts.seen.watched == 2
    assert torch.cuda.get_sync_debug_mode() == 0


def test_generators_of_other_devices_are_not_changed():
    net = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).to(CUDA)
    state = torch.cuda.get_rng_state(CUDA)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fork_rng")
        assert drop_bias_before_norm(net).dropped == {"1": "2"}
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)
