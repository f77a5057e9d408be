"""An overflow in any loop, at any level, with any optimizer: the scale is halved, and the batch has no other effect."""

import copy
import functools
import itertools
import logging

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

from lightning_turbo import ApexAMP, amp
from lightning_turbo.errors import AmpStateError
from tests.amp.loops import INF, backward, init, net, ready, same, sgd, weights
from tests.trainers import quiet_trainer

OVERFLOWS = (0, 2)  # steps of five
OPTIMIZERS = {
    "SGD": lambda params: SGD(params, lr=0.5, momentum=0.9),
    "SGD, fused": lambda params: SGD(params, lr=0.5, momentum=0.9, fused=True),
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "AdamW, fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "Adagrad": lambda params: Adagrad(params, lr=0.01),
}


def loss_of(model, number, of=1):
    """Return the loss of a step or a part of it, so small that only infinite gradients overflow at a scale of 65536."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    loss = (model(inputs).float() - inputs.sum(1, True)).square().mean() * 0.01 / of
    return loss * INF if number in OVERFLOWS else loss


class Record(list):
    """The weights, the optimizer state and the scale before the first step and after each step."""

    def add(self, model, optimizer, scale):
        self.append((weights(model), copy.deepcopy(optimizer.state_dict()["state"]), scale))


def initialized(make, level, record):
    model = net()
    optimizer = make(model.parameters())
    init(model, optimizer, level, loss_scale="dynamic")
    record.add(model, optimizer, 2.0**16)
    return model, optimizer


def by_amp(make, level, steps, window=1):
    record = Record()
    model, optimizer = initialized(make, level, record)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    for number in steps:
        optimizer.zero_grad()
        for part in range(window):
            backward(loss_of(model, number, window), optimizer, delay_unscale=part < window - 1)
        optimizer.step()
        scheduler.step()  # torch would warn about a missing optimizer.step(), and warnings are errors here
        record.add(model, optimizer, amp.state_dict()["loss_scaler0"]["loss_scale"])
    return record


def by_amp_with_a_norm_check(make, level, steps, window=1):
    """A common loop: it checks the norm, drops gradients that are not finite, and skips the step."""
    record = Record()
    model, optimizer = initialized(make, level, record)
    for number in steps:
        optimizer.zero_grad()
        for part in range(window):
            backward(loss_of(model, number, window), optimizer, delay_unscale=part < window - 1)
        norm = nn.utils.get_total_norm([p.grad for p in amp.master_params(optimizer)])
        if torch.isfinite(norm):
            optimizer.step()
        record.add(model, optimizer, amp.state_dict()["loss_scaler0"]["loss_scale"])
    return record


class Module(pl.LightningModule):
    def __init__(self, make, record, window):
        super().__init__()
        self.net, self.make, self.record, self.window = net(), make, record, window
        self.skipped = []

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.9), "interval": "step"}]

    def training_step(self, number, index):
        return loss_of(self.net, number.item())

    def on_train_start(self):
        self.record.add(self.net, self.trainer.optimizers[0], 2.0**16)

    def on_train_batch_end(self, outputs, batch, index):
        if (index + 1) % self.window == 0:
            scaler, optimizer = self.trainer.precision_plugin.scaler, self.trainer.optimizers[0]
            self.record.add(self.net, optimizer, scaler.get_scale())
            self.skipped.append((int(scaler.skipped_steps), scaler.was_skipped(optimizer)))


class Manual(Module):
    automatic_optimization = False

    def training_step(self, number, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, number.item()))
        optimizer.step()
        if not self.trainer.precision_plugin.scaler.was_skipped(optimizer.optimizer):
            self.lr_schedulers().step()


def by_trainer(make, level, steps, module=Module, window=1):
    model = module(make, Record(), window)
    plugin = ApexAMP(level, dtype=torch.float16, loss_scale="dynamic")
    flags = {"accumulate_grad_batches": window, "max_epochs": 1}
    batches = [torch.tensor(number) for number in steps for _ in range(window)]
    quiet_trainer(plugins=[plugin], **flags).fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    bad = [number in OVERFLOWS for number in steps]
    assert model.skipped == [(sum(bad[: k + 1]), skipped) for k, skipped in enumerate(bad)]
    return model.record


LOOPS = {
    "amp": by_amp,
    "amp, windows": functools.partial(by_amp, window=2),
    "amp, dropped by the loop": by_amp_with_a_norm_check,
    "amp, windows dropped by the loop": functools.partial(by_amp_with_a_norm_check, window=2),
    "Trainer": by_trainer,
    "Trainer, windows": functools.partial(by_trainer, window=2),
    "Trainer, manual": functools.partial(by_trainer, module=Manual),
}
ROWS = [
    *((loop, optimizer, level) for loop in LOOPS if loop.startswith("amp") for optimizer in OPTIMIZERS
      for level in ("O1", "O2")),
    *((loop, "SGD", "O3") for loop in LOOPS if loop.startswith("amp")),  # the others need more than half weights
    *(("Trainer", optimizer, level) for optimizer in ("SGD", "AdamW, fused") for level in ("O1", "O2")),
    ("Trainer, windows", "SGD, fused", "O2"), ("Trainer, manual", "AdamW", "O1"), ("Trainer, manual", "SGD", "O3"),
]  # fmt: skip


@pytest.mark.parametrize(("loop", "optimizer", "level"), ROWS)
def test_a_skipped_step_halves_the_loss_scale_and_advances_no_scheduler_or_weight(loop, optimizer, level):
    run, make = LOOPS[loop], OPTIMIZERS[optimizer]
    record = run(make, level, range(5))
    expected = 2.0**16
    for number, (before, after) in enumerate(itertools.pairwise(record)):
        skips = number in OVERFLOWS
        expected /= 1 + skips
        assert after[2] == expected
        assert same(before[0], after[0]) is skips
        if skips and before[1]:  # fused Adam creates its state although it skips
            torch.testing.assert_close(after[1], before[1], rtol=0.0, atol=0.0)
    without = run(make, level, [number for number in range(5) if number not in OVERFLOWS])
    rough = {"rtol": 0.02, "atol": 0.01} if level == "O3" else {"rtol": 2e-3, "atol": 1e-4}  # by another scale
    torch.testing.assert_close(record[-1][0], without[-1][0], **rough)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("passes", "moves", "scales"), [
    ([((INF, 1e-3), (0, 1), 0)], [False, False], [15, 16, 16]),
    ([((0.0, 1e-3), (0, 1), 0), ((INF, 0.0), (0, 1), 0)], [False, True], [15, 16, 16]),
    ([((INF, 0.0), (0,), 0), ((1e-3, 0.0), (0,), 1), ((0.0, 1e-3), (1,), 2)], [False, True], [15, 16, 16]),  # a GAN
], ids=["of both", "of one", "of one among three losses"])  # fmt: skip
def test_an_overflow_skips_one_step_of_the_optimizers_of_its_backward_pass(level, passes, moves, scales):
    """Each pass has factors for the losses of two networks, its optimizers, and its loss_id."""
    models = net(seed=1), net(seed=2)
    optimizers = [sgd(model) for model in models]
    init(list(models), optimizers, level, num_losses=3, loss_scale="dynamic")
    for rows, expected in ((passes, moves), ([((1e-3, 1e-3), (0, 1), 0)], [True, True])):
        before = [weights(model) for model in models]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for factors, which, loss_id in rows:
            losses = [m(torch.ones(2, 4)).float().sum() * f for m, f in zip(models, factors, strict=True) if f]
            backward(sum(losses), [optimizers[i] for i in which], loss_id=loss_id)
        for optimizer in optimizers:
            optimizer.step()
        assert [not same(weights(model), old) for model, old in zip(models, before, strict=True)] == expected
        assert [state["loss_scale"] for state in amp.state_dict().values()] == [2.0**scale for scale in scales]


@pytest.mark.parametrize("verbosity", [0, 1])
def test_an_overflow_is_logged_and_a_loss_scale_of_zero_is_an_error(verbosity, caplog):
    model, optimizer = ready("O1", verbosity=verbosity)
    loss = functools.partial(loss_of, model)
    with caplog.at_level(logging.WARNING, logger="lightning_turbo.amp"):
        backward(loss(1), optimizer)
        assert not caplog.messages
        backward(loss(0), optimizer)
    said = "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768"
    assert caplog.messages == [said] * verbosity
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**-148, "unskipped": 0}})
    backward(loss(0), optimizer)
    with pytest.raises(AmpStateError, match="Loss scaler 0 has reduced its scale to zero"):
        backward(loss(0), optimizer)
