"""What a user's hooks and switches see and do while O2's optimizers hold float32 masters."""

import contextlib
import copy
import itertools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.utils.prune
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, TurboStrategy
from lightning_turbo.errors import AmpUsageError
from tests.versions import LEAN_STEP

LEVELS = ("O0", "O1", "O2", "O3")
QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2,
}  # fmt: skip


def batches():
    return DataLoader(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), batch_size=8)


def fit(module, level, dtype=torch.bfloat16, loss_scale=None, exact=True, **kwargs):
    torch.manual_seed(0)
    plugin = ApexAMP(level, dtype=dtype, loss_scale=loss_scale, exact_masters=exact)
    trainer = pl.Trainer(plugins=[plugin], **{**QUIET, **kwargs})
    trainer.fit(module, batches())
    return trainer


class Gan(pl.LightningModule):
    """Two networks in turn, as Lightning's documentation has it."""

    def __init__(self, toggle, clear):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.toggle, self.clear = toggle, clear

    def training_step(self, batch, index):
        for number, optimizer in enumerate(self.optimizers()):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            if self.clear:
                optimizer.zero_grad()
            fake = self.generator(batch)
            fooled, told = -self.critic(fake).mean(), (self.critic(fake.detach()) - self.critic(batch)).mean()
            self.manual_backward(told if number else fooled)
            optimizer.step()
            optimizer.zero_grad()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (self.generator, self.critic)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_a_toggled_optimizer_keeps_gradients_from_the_other_network(level, dtype):
    toggled, cleared = Gan(toggle=True, clear=False), Gan(toggle=False, clear=True)
    for module in (toggled, cleared):
        fit(module, level, dtype, loss_scale=64.0)
    assert all(torch.equal(a, b) for a, b in zip(toggled.parameters(), cleared.parameters(), strict=True))


class ClearingByModule(Gan):
    """Clears gradients as DCGAN's and many scripts do: those of a network, or of all, and not of an optimizer."""

    def __init__(self, whose):
        super().__init__(toggle=False, clear=False)
        self.whose = whose

    def training_step(self, batch, index):
        for number, optimizer in enumerate(self.optimizers()):
            network = (self.generator, self.critic)[number]
            fake = self.generator(batch)
            fooled, told = -self.critic(fake).mean(), (self.critic(fake.detach()) - self.critic(batch)).mean()
            {"optimizer": optimizer, "network": network, "module": self}[self.whose].zero_grad()
            self.manual_backward(told if number else fooled)
            copy.deepcopy(network).zero_grad()  # is no business of the network's
            optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("whose", ["network", "module"])
@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_of_a_module_clears_what_its_optimizer_steps_with(level, whose, scale):
    module, reference = ClearingByModule(whose), ClearingByModule("optimizer")
    for each in (module, reference):
        fit(each, level, loss_scale=scale)
    for new, old in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(new, old)
    assert not any("zero_grad" in vars(part) for part in module.modules())


def test_what_somebody_set_on_an_object_is_there_after_the_run():
    module, callback = Net(), pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    cleared, started = [], []
    module.first.zero_grad = clear = lambda set_to_none=True: cleared.append(set_to_none)
    callback.on_fit_end = end = lambda trainer, module: started.append(module)
    fit(module, "O2", callbacks=[callback], max_epochs=2)
    assert vars(module.first)["zero_grad"] is clear
    assert vars(callback)["on_fit_end"] is end
    assert started == [module]
    assert "zero_grad" not in vars(module)


class Validated(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, index):
        gradients = (p.grad for optimizer in self.trainer.optimizers for p in optimizer.param_groups[0]["params"])
        assert all(gradient is None for gradient in gradients)

    def val_dataloader(self):
        return batches()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_released_before_a_validation(level):
    fit(Validated(), level, val_check_interval=3)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.norms = []

    def training_step(self, batch, index):
        return 30 * self.last(self.norm(self.first(batch))).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Looking(Net):
    """Logs the norms of gradients and clips them by the module's parameters, as for float32."""

    def on_before_optimizer_step(self, optimizer):
        self.norms.append({name: float(value) for name, value in grad_norm(self, 2).items()})

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class Clipping(Net):
    def on_before_optimizer_step(self, optimizer):
        self.norms.append(None)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)


@pytest.mark.parametrize("strategy", ["auto", "turbo"])
@pytest.mark.parametrize("level", LEVELS)
def test_hooks_before_the_step_see_gradients_in_the_modules_parameters(level, strategy):
    looking, clipping = Looking(), Clipping()
    for module in (looking, clipping):
        lean = TurboStrategy(**LEAN_STEP, device_prefetch=False, cudnn_benchmark=None)
        fit(module, level, strategy=lean if strategy == "turbo" else "auto")
    assert len(looking.norms) == 12
    assert all(len(row) == 7 and row["grad_2.0_norm_total"] > 0 for row in looking.norms)
    assert all(torch.equal(a, b) for a, b in zip(looking.parameters(), clipping.parameters(), strict=True))


def test_a_callback_sees_float32_gradients_too():
    seen = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append({(p.dtype, p.grad.dtype) for p in module.parameters()})

    fit(Net(), "O2", callbacks=[Look()])
    assert seen == [{(torch.float32, torch.float32)}] * 12


@pytest.mark.parametrize("level", LEVELS)
def test_weights_thawed_by_hand_are_trained(level):
    class Thawing(Net):
        def on_train_epoch_start(self):
            self.first.requires_grad_(self.current_epoch == 1)

    module = Thawing()
    before = module.first.weight.detach().clone()
    seen = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(not torch.equal(module.first.weight.float(), before.to(module.first.weight.dtype).float()))

    fit(module, level, callbacks=[Look()])
    assert seen == [False, True]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_weights_thawed_inside_of_float_weights_or_beside_hooks_are_trained(exact, inside):
    class Thawing(Looking):
        def on_train_epoch_start(self):
            with self.trainer.precision_plugin.float_weights() if inside else contextlib.nullcontext():
                self.first.requires_grad_(True)

    module = Thawing()
    module.first.requires_grad_(False)
    before = module.first.weight.detach().clone()
    fit(module, "O2", exact=exact)
    assert (module.first.weight - before).abs().max() > 0.004  # rounding alone moves by less than 0.001


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_weights_thawed_by_hand_are_added_up_in_float32(frozen):
    class Thawing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1, bias=False).requires_grad_(not frozen)
            self.seen = []

        def on_train_start(self):
            self.net.requires_grad_(True)

        def training_step(self, batch, index):
            # In bfloat16 256 and 1 are 256. Lightning divides by 3.
            return 3 * (256.0 if index % 3 == 0 else 1.0) * self.net(torch.ones(1, 1)).float().sum()

        def look(self, optimizer, args, kwargs):
            self.seen.append(optimizer.param_groups[0]["params"][0].grad.item())

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
            optimizer.register_step_pre_hook(self.look)
            return optimizer

    module = Thawing()
    fit(module, "O2", accumulate_grad_batches=3)
    assert module.seen == [258.0] * 4


def test_frozen_weights_are_left_alone_by_weight_decay():
    module = Net()
    module.first.requires_grad_(False)
    before = module.first.weight.detach().clone()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    fit(module, "O2", accumulate_grad_batches=2)
    assert torch.equal(module.first.weight, before)
    assert not module.first.weight.requires_grad


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("hooks", [False, True])
def test_a_momentum_encoder_moves_outside_of_float_weights_too(hooks, exact):
    class Byol(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.online, self.target = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)

        def training_step(self, batch, index):
            return (self.online(batch) - self.target(batch)).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

        def on_before_zero_grad(self, optimizer):
            for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.data = (mine.data + theirs.data) / 2

        def on_train_batch_end(self, outputs, batch, index):
            moved.append(self.target.weight.float().clone())

    class Hooked(Byol):
        def on_after_backward(self):
            assert self.target.weight.dtype is torch.float32

    moved = []
    fit(Hooked() if hooks else Byol(), "O2", exact=exact)
    assert len(moved) == 12
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(moved))


def test_a_momentum_encoder_moves_by_less_than_half_precision_shows():
    class Momentum(Net):
        def __init__(self):
            super().__init__()
            self.target = nn.Linear(4, 8)
            self.target.requires_grad_(False)
            self.expected = None

        def on_train_batch_end(self, *args):
            with torch.no_grad(), self.trainer.precision_plugin.float_weights():
                if self.expected is None:
                    self.expected = self.target.weight.clone()
                self.expected.lerp_(self.first.weight, 1e-4)
                self.target.weight.lerp_(self.first.weight, 1e-4)

    module = Momentum()
    fit(module, "O2")
    assert torch.equal(module.target.weight, module.expected)


@pytest.mark.parametrize("level", LEVELS)
def test_the_network_can_be_called_in_these_hooks_in_float32(level):
    seen = []

    class Calling(Net):
        def on_before_optimizer_step(self, optimizer):
            with self.trainer.precision_plugin.float_weights(), torch.no_grad():  # a second time: nothing happens
                seen.append(self.last(self.norm(self.first(torch.ones(2, 4)))).dtype)
            if level == "O2":
                assert self.first.weight.dtype is torch.float32

    fit(Calling(), level)
    assert seen == [torch.float32] * 12


def test_an_error_in_such_a_hook_leaves_the_module_as_it_was():
    class Failing(Net):
        def on_before_optimizer_step(self, optimizer):
            raise KeyError("mine")

    module = Failing()
    own = list(module.parameters())
    with pytest.raises(KeyError, match="mine"):
        fit(module, "O2")
    assert all(a is b for a, b in zip(module.parameters(), own, strict=True))
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_between_forward_and_backward_autograd_notices_changes_and_nothing_else():
    class Within(Net):
        change = False

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            with torch.no_grad(), self.trainer.precision_plugin.float_weights():
                assert self.last.weight.dtype is torch.float32
                if self.change:
                    self.last.weight.mul_(2)
            return loss

    module, plain = Within(), Net()
    for each in (module, plain):
        fit(each, "O2")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    module = Within()
    module.change = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(module, "O2")


class Masking(Net):
    """Trains the last layer alone, by gradients that it takes away when they are made."""

    def on_after_backward(self):
        self.norms.append({name for name, param in self.named_parameters() if param.grad is not None})
        for param in self.first.parameters():
            param.grad.zero_()


@pytest.mark.parametrize("strategy", ["auto", "turbo"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_can_be_changed_after_the_backward_pass(level, strategy):
    module, start = Masking(), Net()
    lean = TurboStrategy(**LEAN_STEP, device_prefetch=False, cudnn_benchmark=None)
    fit(module, level, strategy=lean if strategy == "turbo" else "auto")
    assert module.norms == [{name for name, _ in start.named_parameters()}] * 12
    assert torch.equal(module.first.weight.bfloat16(), start.first.weight.bfloat16())
    assert not torch.equal(module.last.weight, start.last.weight)


class Centred(nn.Module):
    """Holds a float that is made once, one that is changed in place, and one that is assigned."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("basis", torch.linspace(0.1, 1.1, 16).reshape(4, 4))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        return self.linear(x @ self.basis)


class WithBuffers(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Centred()

    def training_step(self, batch, index):
        return self.net(batch).float().mean()

    def validation_step(self, batch, index):
        self.net(batch)

    def on_before_optimizer_step(self, optimizer):
        assert self.net(torch.ones(2, 4)).dtype is torch.float32
        self.net.count += 0.001
        self.net.centre = self.net.centre * 0.9 + 0.1003

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_float32_buffers_lose_no_digit(tmp_path, level):
    module, start = WithBuffers(), WithBuffers()
    trainer = pl.Trainer(plugins=[ApexAMP(level, dtype=torch.bfloat16)], **QUIET)
    trainer.validate(module, batches(), verbose=False)
    assert all(torch.equal(value, start.state_dict()[name]) for name, value in module.state_dict().items())

    saved = {}

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            saved.update(module.state_dict())

    trainer = fit(module, level, callbacks=[Save()])
    count, centre = torch.zeros(1), torch.zeros(4)
    for _ in range(12):
        count += 0.001
        centre = centre * 0.9 + 0.1003
    for state in (saved, module.state_dict()):
        assert torch.equal(state["net.basis"], start.net.basis)
        assert torch.equal(state["net.count"], count)
        assert torch.equal(state["net.centre"], centre)

    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = WithBuffers()
    pl.Trainer(plugins=[ApexAMP(level, dtype=torch.bfloat16)], **QUIET).validate(
        resumed, batches(), ckpt_path=tmp_path / "a.ckpt", verbose=False
    )
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize("level", LEVELS)
def test_a_network_whose_forward_is_set_on_the_instance(level):
    class Redirected(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.net.forward = lambda x: nn.functional.linear(x, self.net.weight)

        def training_step(self, batch, index):
            assert not (level in ("O2", "O3") and self.net.weight.dtype is torch.float32)
            return self.net(batch).float().mean()

    module, start = Redirected(), Redirected()
    fit(module, level)
    assert not torch.equal(module.net.weight, start.net.weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_modules_whose_weights_cannot_be_cast_are_refused(level):
    module = Net()
    module.last = nn.LazyLinear(1)
    with pytest.raises(AmpUsageError, match=rf"{level} was given a LazyLinear that has not seen a batch yet.*Call the"):
        fit(module, level)
    module.last = torch.jit.trace(nn.Linear(8, 1), torch.ones(1, 8))
    with pytest.raises(AmpUsageError, match=rf"{level} was given a TorchScript module \(Linear\).*or take O0 or O1"):
        fit(module, level)


def another_parameter(net):
    net[2].weight = nn.Parameter(torch.full_like(net[2].weight, 0.125))


def without_weight_norm(net):
    nn.utils.remove_weight_norm(net[0])


def without_mask(net):
    nn.utils.prune.remove(net[2], "weight")


def fused(net):
    net[0] = nn.utils.fusion.fuse_linear_bn_eval(net[0].eval(), net[1].eval())
    net[1] = nn.Identity()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("change", [another_parameter, without_weight_norm, without_mask, fused])
def test_parameters_replaced_or_taken_away(change, level, inside):
    class Changed(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            if change is without_weight_norm:
                nn.utils.weight_norm(self.net[0])
            elif change is without_mask:
                nn.utils.prune.l1_unstructured(self.net[2], "weight", 0.5)

        def training_step(self, batch, index):
            return self.net(batch).float().square().mean()

        def on_train_end(self):
            if inside and isinstance(self.trainer.precision_plugin, ApexAMP):
                with self.trainer.precision_plugin.float_weights():
                    change(self.net)
            else:
                change(self.net)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    plain, ours = Changed(), Changed()
    pl.Trainer(**QUIET).fit(plain, batches())
    fit(ours, level)
    wanted, state = plain.state_dict(), ours.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert state[name].dtype is value.dtype
        torch.testing.assert_close(state[name], value, rtol=0.05, atol=0.02)
    ours.eval().net(torch.randn(2, 4))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2.0 * weight


def pruned(layer):
    nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    return "weight_orig"


def parametrized(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return "parametrizations.weight.original"


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("change", [pruned, parametrized])
def test_weights_that_get_another_name_in_training_stay_float32_in_its_state(change, level):
    class Changing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

        def training_step(self, batch, index):
            if index == 1:
                self.name = change(self.net[0])
            return self.net(batch).square().mean()

        def on_before_optimizer_step(self, optimizer):
            assert {p for g in optimizer.param_groups for p in g["params"]} == set(self.parameters())
            assert all(p.grad is not None for p in self.parameters())

        def on_train_end(self):
            state = self.net[0].state_dict()
            assert {value.dtype for value in state.values()} == {torch.float32}
            if level == "O2":
                updated = self.optimizers().param_groups[0]["params"][0]
                assert torch.equal(state[self.name], updated)
                loaded = {**state, self.name: state[self.name] + 1e-6}
                self.net[0].load_state_dict(loaded)
                assert torch.equal(updated, loaded[self.name])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    fit(Changing(), level)
