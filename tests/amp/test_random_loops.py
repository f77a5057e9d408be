"""Random loops of passes, steps, clipped and zeroed gradients, beside apex's rules written down in a few lines."""

import random

import pytest
import torch
from torch import nn

from lightning_turbo import amp
from tests.amp.loops import INF

WINDOW = 3


class Rules:
    """Two optimizers with a weight each, and two losses, by the rules of apex for float32 weights.

    In addition, an overflow is known as long as its gradients are there, and no longer; and gradients that a pass left
    scaled keep their value, though the scale changes before they are unscaled.
    """

    def __init__(self):
        self.weights, self.gradients = [1.0, 1.0], [0.0, 0.0]
        self.is_scaled, self.skips, self.skipped = [False, False], [False, False], [False, False]
        self.scales, self.unskipped = [2.0**16, 2.0**16], [0, 0]

    def backward(self, which, loss, factor, delay):
        for i in which:
            self.skips[i] = (self.skips[i] or self.skipped[i]) and self.gradients[i] != 0.0
            self.skipped[i] = False
        overflow = any(self.is_scaled[i] and self.gradients[i] == INF for i in which) or factor == INF
        for i in which:
            self.gradients[i] += factor
            self.is_scaled[i] = delay
            self.skips[i] |= overflow and not delay
        if delay:
            return
        self.unskipped[loss] = 0 if overflow else self.unskipped[loss] + 1
        if overflow:
            self.scales[loss] /= 2
        elif self.unskipped[loss] == WINDOW:
            self.scales[loss], self.unskipped[loss] = min(2 * self.scales[loss], 2.0**24), 0

    def step(self, i):
        self.skipped[i], self.skips[i] = self.skips[i], False
        self.weights[i] -= 0.0 if self.skipped[i] else self.gradients[i]

    def clip(self, i):
        self.gradients[i] = min(self.gradients[i], 2.0)

    def zero(self, i):
        self.gradients[i], self.is_scaled[i] = 0.0, False


class Loop:
    def __init__(self, level):
        self.model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])
        self.optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in self.model]
        settings = {"loss_scale": "dynamic", "scale_window": WINDOW, "num_losses": 2, "verbosity": 0}
        amp.initialize(self.model, self.optimizers, opt_level=level, dtype=torch.float16, **settings)

    def backward(self, which, loss, factor, delay):
        optimizers = [self.optimizers[i] for i in which]
        value = sum(self.model[i].sum() for i in which) * factor
        with amp.scale_loss(value, optimizers, loss_id=loss, delay_unscale=delay) as scaled:
            scaled.backward()

    def step(self, i):
        self.optimizers[i].step()

    def clip(self, i):
        if self.model[i].grad is not None:  # which torch refuses
            nn.utils.clip_grad_value_(self.model[i], 2.0)

    def zero(self, i):
        self.optimizers[i].zero_grad()


def calls(draw):
    """Yield calls; as in apex, scaled gradients are unscaled by a pass of the same loss before anything uses them."""
    scaled = {}  # optimizer -> the loss whose scale its gradients have
    for _ in range(draw.randint(10, 50)):
        kind = draw.choice(("backward", "backward", "backward", "step", "clip", "zero"))
        which, loss = draw.choice(([0], [1], [0, 1])), draw.randrange(2)
        if kind != "backward":
            yield from ((kind, i) for i in which if i not in scaled)
        elif all(scaled.get(i, loss) == loss for i in which):
            delay = draw.random() < 0.4
            yield (kind, which, loss, draw.choice((1.0, 1.0, 2.0, 3.0, INF)), delay)
            scaled = {i: of for i, of in scaled.items() if i not in which}
            scaled.update(dict.fromkeys(which if delay else (), loss))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_200_random_loops_follow_the_rules_of_apex(level, first):
    for seed in range(first, first + 50):
        rules, loop = Rules(), Loop(level)
        for name, *values in calls(random.Random(seed)):
            for each in (rules, loop):
                getattr(each, name)(*values)
            scales = [each["loss_scale"] for each in amp.state_dict().values()]
            assert scales == rules.scales, f"seed {seed}, after {name} {values}"
            assert [weight.item() for weight in loop.model] == rules.weights, f"seed {seed}, after {name} {values}"
        amp.shutdown()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("ends", ["delayed", "unscaled", "zeroed"])
def test_an_overflow_is_known_through_clipping_and_delayed_passes(level, ends):
    loop = Loop(level)
    loop.backward([0], 0, INF, False)
    loop.clip(0)
    if ends == "zeroed":
        loop.zero(0)
    loop.backward([0], 0, 1.0, True)
    if ends != "delayed":
        loop.backward([0], 0, 1.0, False)
    loop.step(0)
    assert loop.model[0].item() == (-1.0 if ends == "zeroed" else 1.0)
    amp.shutdown()
