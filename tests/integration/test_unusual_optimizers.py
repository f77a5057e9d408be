"""Optimizers that change weights outside of step, step twice, share parameters or get more of them, at O0 to O3."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_turbo import ApexAMP, ApexGradScaler
from tests.integration.regression import Regression, apart, fit, flat

HALF = {"dtype": torch.bfloat16}
MIXES = [("O1", torch.float16), ("O2", torch.bfloat16), ("O2", torch.float16)]
NO_OPTIMIZER = pytest.mark.filterwarnings("ignore:.*will run with no optimizer")


def low_scale(level, dtype):
    """A plugin with a scale at which the first step does not overflow."""
    if dtype is not torch.float16:
        return ApexAMP(level, dtype=dtype)
    return ApexAMP(level, dtype=dtype, scaler=ApexGradScaler(max_scale=64.0))


class Sam(Optimizer):
    """Sharpness-aware minimization (Foret et al., 2021) around SGD, in two calls."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = SGD(self.param_groups, lr=0.02)
        self.param_groups = self.base.param_groups

    def first_step(self):
        norm = torch.stack([p.grad.float().norm() for p in self.held()]).norm()
        for p in self.held():
            self.state[p]["old"] = p.data.clone()
            p.data.add_(p.grad * (0.5 / norm).to(p.dtype))
            p.grad = None

    def second_step(self):
        for p in self.held():
            p.data.copy_(self.state[p]["old"])
        self.base.step()
        self.base.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()

    def held(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class SharpnessAware(Regression):
    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for step in (optimizer.first_step, optimizer.second_step):
            loss = self.loss(batch)
            self.manual_backward(loss)
            step()
            self.losses.append(loss.item())

    def configure_optimizers(self):
        return Sam(self.parameters())


class SharpnessAwareInOneStep(Regression):
    def configure_optimizers(self):
        return Sam(self.parameters())


@pytest.mark.parametrize(("kind", "level", "settings", "limit"), [
    (SharpnessAware, "O1", {"loss_scale": 8.0}, 0.005), (SharpnessAware, "O2", {}, 0.005),
    (SharpnessAware, "O3", {}, 0.02), (SharpnessAwareInOneStep, "O2", {}, 0.005),
])  # fmt: skip
def test_the_second_pass_of_sam_sees_the_weights_of_its_first_step(kind, level, settings, limit):
    ours, plain = fit(kind(), ApexAMP(level, **HALF, **settings)), fit(kind())
    assert ours.losses == pytest.approx(plain.losses, rel=0.02)
    assert apart(ours, plain, type(plain)()) < limit


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sam_is_refused_with_a_dynamic_loss_scale(level):
    with pytest.raises(MisconfigurationException, match="once per step, got Sam, whose further passes"):
        fit(SharpnessAwareInOneStep(), ApexAMP(level, **HALF, loss_scale=8.0))
    said = r"expected a fixed loss scale for Sam.*Pass dtype=torch.bfloat16"
    with pytest.raises(MisconfigurationException, match=said):
        fit(SharpnessAware(), ApexAMP(level, dtype=torch.float16))


class SharedTrunk(Regression):
    """Two optimizers that share the parameters of a trunk. Both step after both backward passes."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"trunk": nn.Linear(4, 8), "up": nn.Linear(8, 1), "down": nn.Linear(8, 1)})

    def both(self, batch):
        hidden = torch.tanh(self.net["trunk"](batch[0]))
        return [nn.functional.mse_loss(self.net[name](hidden).float(), sign * batch[1]) for name, sign in
                (("up", 1), ("down", -1))]  # fmt: skip

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        up, down = self.both(batch)
        self.manual_backward(up, retain_graph=True)
        self.manual_backward(down)
        for optimizer in self.optimizers():
            optimizer.step()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return [
            SGD([*self.net["trunk"].parameters(), *self.net[name].parameters()], lr=0.01) for name in ("up", "down")
        ]


@pytest.mark.parametrize(("level", "scale"), [("O1", 128.0), ("O2", 1.0), ("O2", 128.0), ("O3", 128.0)])
def test_optimizers_that_share_parameters_train_as_in_float32(level, scale):
    ours, plain = fit(SharedTrunk(), ApexAMP(level, **HALF, loss_scale=scale)), fit(SharedTrunk())
    assert apart(ours, plain, type(plain)()) < (0.02 if level == "O3" else 0.005)


def test_an_overflow_of_shared_gradients_skips_every_optimizer_that_has_them():
    class Overflowing(SharedTrunk):
        def both(self, batch):
            up, down = super().both(batch)
            return up * 1e9, down

    module = fit(Overflowing(), ApexAMP("O1", dtype=torch.float16), max_epochs=1)
    assert torch.equal(flat(module), flat(SharedTrunk()))


class Adversaries(Regression):
    """The generator's loss overflows in the second batch. Its gradients reach the critic too."""

    automatic_optimization = False

    def __init__(self, steps=1, to_none=True):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)
        self.moved, self.steps, self.to_none = [], steps, to_none

    def training_step(self, batch, index):
        losses = (
            lambda: self.critic(batch[0]).float().mean() * 0.1,
            lambda: -self.critic(self.generator(batch[0])).float().mean() * (1e6 if index == 1 else 0.1),
        )
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            held = optimizer.param_groups[0]["params"][0]
            before = held.detach().clone()
            optimizer.zero_grad(set_to_none=self.to_none)
            self.manual_backward(loss())
            for _ in range(self.steps):
                optimizer.step()
            self.moved.append(not torch.equal(held, before))
            assert held.isfinite().all()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return [SGD(network.parameters(), lr=0.1) for network in (self.critic, self.generator)]


@pytest.mark.parametrize(("level", "steps", "to_none"), [("O1", 1, True), ("O1", 2, False), ("O2", 2, True)])
def test_an_overflow_skips_only_the_steps_that_use_its_gradients(level, steps, to_none):
    plugin = ApexAMP(level, dtype=torch.float16, scaler=ApexGradScaler(max_scale=1024.0))
    module = fit(Adversaries(steps, to_none), plugin, max_epochs=1)
    assert module.moved == [True, True, True, False, True, True, True, True]
    assert plugin.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 4}}


class Wrapping(SGD):
    """Keeps its parameters a second time, as ZeroRedundancyOptimizer does."""

    def __init__(self, params, lr):
        params = list(params)
        super().__init__(params, lr=lr)
        self.optim = SGD(params, lr=lr)

    def step(self, closure=None):
        return self.optim.step(closure)


class Wrapped(Regression):
    def configure_optimizers(self):
        return Wrapping(self.parameters(), lr=0.02)


class ByHand(Regression):
    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.chosen(index)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Growing(ByHand):
    """Adds the second layer to its optimizer after an epoch, through the LightningOptimizer of the training step."""

    def chosen(self, index):
        if self.current_epoch == 1 and index == 0:
            self.optimizers().add_param_group({"params": list(self.net[2].parameters())})
        return self.optimizers()

    def configure_optimizers(self):
        return SGD(self.net[0].parameters(), lr=0.02)


class Replacing(Regression):
    """Creates its optimizer again in the second epoch."""

    def __init__(self, by_strategy=False):
        super().__init__()
        self.by_strategy = by_strategy

    def on_train_epoch_start(self):
        if self.current_epoch == 1 and self.by_strategy:
            self.trainer.strategy.setup_optimizers(self.trainer)
        elif self.current_epoch == 1:
            self.trainer.optimizers = [self.configure_optimizers()]


class ReplacingByHand(Replacing, ByHand):
    def chosen(self, index):
        return self.optimizers()


@pytest.mark.parametrize(("level", "dtype", "by_strategy", "kind"), [
    ("O1", torch.float16, True, Replacing), ("O1", torch.float16, False, ReplacingByHand),
    ("O2", torch.float16, False, Replacing), ("O2", torch.bfloat16, True, ReplacingByHand),
])  # fmt: skip
def test_an_optimizer_recreated_during_training_continues(level, dtype, by_strategy, kind):
    ours = fit(kind(by_strategy), low_scale(level, dtype))
    assert apart(ours, fit(kind(by_strategy)), kind()) < 0.06


class Own(ByHand):
    """Steps an optimizer that Lightning does not know."""

    def on_train_start(self):
        self.own = SGD(self.parameters(), lr=0.02)

    def chosen(self, index):
        return self.own

    def configure_optimizers(self):
        return None


class Past(ByHand):
    """Steps the optimizer directly, without Lightning."""

    def chosen(self, index):
        return self.optimizers(use_pl_optimizer=False)


@NO_OPTIMIZER
@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("kind", [Wrapped, Growing, Own, Past])
def test_optimizers_that_lightning_does_not_step(kind, level):
    assert apart(fit(kind(), ApexAMP(level, **HALF)), fit(kind()), kind()) < 0.06


@NO_OPTIMIZER
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_would_stay_scaled_are_refused(level):
    said = r"expected optimizers from configure_optimizers.*or pass loss_scale=1.0"
    with pytest.raises(MisconfigurationException, match=said):
        fit(Own(), ApexAMP(level, dtype=torch.float16))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(("level", "dtype"), [("O0", None), *MIXES])
def test_an_accumulation_window_whose_last_batch_has_no_loss_still_steps(level, dtype):
    class Skipping(Regression):
        def training_step(self, batch, index):
            return None if index == 3 else super().training_step(batch, index)

    plugin, flags = low_scale(level, dtype), {"accumulate_grad_batches": 2, "max_epochs": 2}
    assert apart(fit(Skipping(), plugin, **flags), fit(Skipping(), **flags), Skipping()) < 0.06


def test_O0_keeps_a_float64_network_in_float64():
    class Double(Regression):
        def __init__(self):
            super().__init__()
            self.double()

        def loss(self, batch):
            return nn.functional.mse_loss(self.net(batch[0].double()), batch[1].double())

    assert torch.equal(flat(fit(Double(), ApexAMP("O0"))), flat(fit(Double())))
