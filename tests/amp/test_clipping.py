"""Gradient clipping with a loss scale, in every kind of loop: it acts on unscaled gradients, as in float32."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_turbo import ApexAMP, amp
from tests.amp.loops import init, net
from tests.trainers import quiet_trainer

LIMITS = {"norm": 0.05, "value": 0.01}
STEPS = 5
CLIP = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}


def loss_of(model, number, of=1):
    """Return the loss of a step or a part of it. Its gradients exceed the limit, and a scale of 65536 is safe."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    return (model(inputs).float() - inputs.sum(1, True)).square().mean() * 0.1 / of


def size_of(params, kind):
    grads = torch.cat([p.grad.float().flatten() for p in params])
    return float(grads.norm(2 if kind == "norm" else torch.inf))


def stepper(model, fused=False):
    return SGD(model.parameters(), lr=0.5, momentum=0.9, fused=fused)


@functools.cache
def in_float32(kind):
    """Return the final weights of a plain torch loop."""
    model = net()
    optimizer = stepper(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        assert size_of(model.parameters(), kind) > 1.5 * LIMITS[kind]
        CLIP[kind](model.parameters(), LIMITS[kind])
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def by_amp(kind, level, scale, window=1, inside=False, fused=False):
    model = net()
    optimizer, sizes = stepper(model, fused), []
    init(model, optimizer, level, loss_scale=scale)
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(window):
            last = part == window - 1
            with amp.scale_loss(loss_of(model, number, window), optimizer, delay_unscale=not last) as scaled:
                scaled.backward()
                if inside:  # gradients are scaled at this point, as in apex
                    CLIP[kind](
                        amp.master_params(optimizer), LIMITS[kind] * amp.state_dict()["loss_scaler0"]["loss_scale"]
                    )
        if not inside:
            CLIP[kind](amp.master_params(optimizer), LIMITS[kind])
        sizes.append(size_of(model.parameters(), kind))
        optimizer.step()
    return model, sizes


class Module(pl.LightningModule):
    def __init__(self, kind, fused):
        super().__init__()
        self.net, self.kind, self.fused, self.sizes, self.of = net(), kind, fused, [], 1

    def configure_optimizers(self):
        return stepper(self, self.fused)

    def training_step(self, number, index):
        return loss_of(self.net, number.item())

    def on_before_zero_grad(self, optimizer):
        if self.net[0].weight.grad is not None:
            self.sizes.append(size_of(self.parameters(), self.kind))


class InHook(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, LIMITS[self.kind], self.kind)


class Manual(Module):
    automatic_optimization = False

    def training_step(self, number, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, number.item()))
        self.clip_gradients(optimizer, LIMITS[self.kind], self.kind)
        self.sizes.append(size_of(self.parameters(), self.kind))
        optimizer.step()


def by_trainer(kind, level, scale, module=Module, window=1, fused=False):
    model = module(kind, fused)
    plugin = ApexAMP(level, dtype=torch.float16, loss_scale=scale)
    flags = {"gradient_clip_val": LIMITS[kind], "gradient_clip_algorithm": kind} if module is Module else {}
    batches = [torch.tensor(number) for number in range(STEPS) for _ in range(window)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    quiet_trainer(plugins=[plugin], max_epochs=1, accumulate_grad_batches=window, **flags).fit(model, loader)
    return model.net, model.sizes


LOOPS = {
    "amp": by_amp,
    "amp, fused": functools.partial(by_amp, fused=True),
    "amp, windows": functools.partial(by_amp, window=2),
    "amp, in scale_loss": functools.partial(by_amp, inside=True),
    "Trainer": by_trainer,
    "Trainer, fused": functools.partial(by_trainer, fused=True),
    "Trainer, windows": functools.partial(by_trainer, window=2),
    "Trainer, configure_gradient_clipping": functools.partial(by_trainer, module=InHook),
    "Trainer, manual": functools.partial(by_trainer, module=Manual),
}
ROWS = [
    *((loop, level, *how) for loop in LOOPS if loop.startswith("amp") for level in ("O0", "O1", "O2", "O3")
      for how in (("dynamic", "norm"), (128.0, "value")) if (loop, level) != ("amp, fused", "O3")),
    *(("Trainer", level, 128.0, kind) for level in ("O0", "O1", "O2", "O3") for kind in CLIP),
    *((loop, level, "dynamic", "norm") for loop in LOOPS if loop.startswith("Trainer, ") for level in ("O1", "O2")),
]  # fmt: skip


@pytest.mark.parametrize(("loop", "level", "scale", "kind"), ROWS)
def test_clipping_acts_on_unscaled_gradients_and_trains_as_float32_does(loop, level, scale, kind):
    wanted = in_float32(kind)
    model, sizes = LOOPS[loop](kind, level, scale)
    rough = level == "O3"
    assert sizes == pytest.approx([LIMITS[kind]] * len(sizes), rel=4e-3 if rough else 2e-4)
    assert len(sizes) >= STEPS - 1
    end = nn.utils.parameters_to_vector(p.detach().float() for p in model.parameters())
    start = nn.utils.parameters_to_vector(net().parameters()).detach()
    assert (end - wanted).norm() / (wanted - start).norm() < (0.1 if rough else 0.01)
