"""Techniques of the training step on CUDA: memory, fused optimizers, and apex's FusedLAMB if it is installed."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ExactAccumulation, GradToNone
from lightning_turbo._lightning import LightningModule
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.gpu


class Wide(LightningModule):
    """Three layers of 64 MiB with activations of about the same size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(3)])
        self.peaks = []

    def training_step(self, batch, batch_idx):
        torch.cuda.reset_peak_memory_stats()
        x = batch
        for layer in self.net:
            x = torch.tanh(layer(x))
        self.peaks.append(torch.cuda.max_memory_allocated() / 2**20)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def peak_of_the_forward_pass(callbacks):
    gc.collect()
    torch.cuda.empty_cache()
    model = Wide()
    quiet_trainer(accelerator="gpu", max_steps=4, callbacks=callbacks).fit(
        model, DataLoader(torch.randn(4096, 4096), batch_size=1024)
    )
    return model.peaks[3], [p.detach().cpu() for p in model.parameters()]


def test_the_peak_of_the_forward_pass_is_lower_by_the_gradients():
    late, expected = peak_of_the_forward_pass([])
    early, got = peak_of_the_forward_pass([GradToNone()])
    assert late - early == pytest.approx(192, rel=0.05)  # three gradients of 64 MiB
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def device_size(batch):
    return torch.tensor(len(batch), device=batch.device)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_exact_accumulation_without_a_value_on_the_host(precision):
    model, reference = Net(), Net().cuda()
    data = torch.randn(10, 3, 32, 32)
    seen = []
    model.on_before_optimizer_step = lambda _: seen.append([p.grad.clone() for p in model.parameters()])
    trainer = quiet_trainer(
        accelerator="gpu", max_epochs=1, accumulate_grad_batches=8, precision=precision,
        callbacks=[ExactAccumulation(device_size)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=4))  # one window of 4, 4 and 2
    half = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    with torch.autocast("cuda", dtype=half, enabled=half is not None):
        loss = reference(data.cuda()).square().mean()
    (loss * 2**10).backward()  # keeps float16 gradients from underflowing
    # Both have the same casts, so only sums in float32 (TF32: 10 bits) or half (10 or 7 bits) are rounded differently.
    for a, b in zip(seen[0], reference.parameters(), strict=True):
        expected = b.grad / 2**10
        torch.testing.assert_close(a, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
