"""GradToNone: same results, same gradients in every hook, and no gradients during the forward pass."""

import copy
import pickle
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, GradToNone, Preemption, TurboStrategy
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import quiet_trainer


class Net(LightningModule):
    """Records before each forward pass whether there are gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Parameter(torch.ones(1))
        self.held = []

    def training_step(self, batch, batch_idx):
        self.held.append(any(p.grad is not None for p in self.parameters()))
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(n):
    return DataLoader(torch.randn(n, 4, generator=torch.Generator().manual_seed(7)), batch_size=3)


def fit(model, *callbacks, level=None, **flags):
    plugins = [ApexAMP(level, loss_scale="dynamic")] if level else []
    settings = {"max_epochs": 2, "plugins": plugins, "callbacks": list(callbacks), "limit_val_batches": 0, **flags}
    quiet_trainer(**settings).fit(model, batches(18), batches(3))
    return model


class Clears(Net):
    """Manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Keeps(Net):
    """Never clears its gradients."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class Lookahead(torch.optim.Optimizer):
    """A common implementation: an Optimizer that never calls the constructor of its base class."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, {}

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class Lars:
    """Sets ``__class__`` to pass as an Optimizer."""

    __class__ = property(lambda self: torch.optim.Optimizer)

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name in ("param_groups", "state", "defaults", "zero_grad", "state_dict", "load_state_dict"):
            return getattr(self.inner, name)
        raise AttributeError(name)

    def step(self, closure=None):
        return self.inner.step(closure)


class Forwards(Lars):
    """Forwards attributes to its inner optimizer."""

    def __getattr__(self, name):
        return getattr(self.inner, name)


# Lightning checks a protocol, which since Python 3.12 ignores attributes from __getattr__.
LOOKS_PAST_GETATTR = pytest.mark.skipif(sys.version_info >= (3, 12), reason="Lightning refuses such a wrapper")


def wrapped(wrap):
    class Wraps(Net):
        def configure_optimizers(self):
            return wrap(super().configure_optimizers())

    return Wraps


def same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(("make", "flags", "warning"), [
    (Net, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, ""),
    (Net, {"accumulate_grad_batches": 2, "level": "O2"}, ""),
    pytest.param(wrapped(Forwards), {}, "", marks=LOOKS_PAST_GETATTR),
    (Keeps, {}, "Keeps.optimizer_zero_grad decides when gradients are cleared"),
    (Clears, {}, "manual optimization clears gradients itself"),
    (wrapped(Lookahead), {}, r"Lookahead does not call Optimizer.__init__"),
    pytest.param(
        wrapped(Lars), {"level": "O2"}, r"Lars does not call Optimizer.__init__", marks=LOOKS_PAST_GETATTR
    ),
])  # fmt: skip
def test_grad_to_none_keeps_the_results_and_releases_gradients_or_warns(make, flags, warning):
    plain = fit(make(), **flags)
    with pytest.warns(NoEffectWarning, match=warning) if warning else nullcontext():
        released = fit(make(), GradToNone(), **flags)
    same(plain, fit(make(), strategy="turbo", **flags))  # GradToNone logs it
    same(plain, released)
    window = flags.get("accumulate_grad_batches", 1)
    if not warning:
        assert plain.held[2 * window]
        assert not released.held[2 * window]
    if window == 2:
        assert released.held[2 * window + 1]  # within an accumulation window they must stay


def test_the_last_step_of_weight_averaging_keeps_its_gradients():
    def run(*callbacks, **flags):
        model = Net()
        model.net.insert(1, nn.BatchNorm1d(8))
        averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
        return fit(model, averaging, *callbacks, max_epochs=3, gradient_clip_val=0.5, **flags)

    plain = run()
    with pytest.warns(NoEffectWarning, match="StochasticWeightAveraging uses the last gradients in one more step"):
        same(plain, run(GradToNone()))
    same(plain, run(strategy="turbo"))


def test_grad_to_none_refuses_strategies_that_accumulate_and_warns_about_bucket_views():
    strategy = SimpleNamespace(handles_gradient_accumulation=True)
    trainer = SimpleNamespace(strategy=strategy, model=SimpleNamespace(gradient_as_bucket_view=True))
    with pytest.raises(MisconfigurationException, match="keeps and clears gradients itself"):
        GradToNone().setup(trainer, Net(), "fit")
    with pytest.warns(NoEffectWarning, match="gradients are views of DDP's buckets"):
        GradToNone().on_train_start(trainer, Net())


HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") and not name.endswith(("checkpoint", "exception"))]


class Reads(pl.Callback):
    """Records the norm of the gradients in every hook, in ``on_before_zero_grad`` only on request."""

    def __init__(self, late):
        self.norms = []
        for hook in HOOKS:
            if late or hook != "on_before_zero_grad":
                setattr(self, hook, self.reading(hook))

    def reading(self, hook):
        def read(trainer, module, *args, **kwargs):
            norms = [float(p.grad.norm()) for p in module.parameters() if p.grad is not None]
            self.norms.append((hook, trainer.global_step, norms))

        return read


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("model", "flags"), [
    (Net, {}), (Net, {"accumulate_grad_batches": 4}), (Net, {"limit_val_batches": 1, "val_check_interval": 4}),
    (Net, {"level": "O2"}), (Clears, {}), (Clears, {"limit_val_batches": 1, "val_check_interval": 4}),
], ids=str)  # fmt: skip
def test_every_hook_sees_the_same_gradients_with_grad_to_none(model, flags, late):
    def run(*callbacks, **more):
        fit(made := model(), reads := Reads(late), *callbacks, **flags, **more)
        return reads.norms, made.held

    expected, held = run()
    assert any(hook == "on_train_epoch_end" and norms for hook, _, norms in expected)
    for lean in (False, None):
        norms, now = run(strategy=TurboStrategy(lean=lean))
        assert norms == expected
        assert (now != held) == (model is Net and not late)
    if model is Net and not late:
        norms, _ = run(GradToNone())
        assert norms == expected


def test_a_hook_that_reads_gradients_after_the_forward_pass_keeps_them_and_warns():
    class Late(Net):
        def on_before_zero_grad(self, optimizer):
            pass

    with pytest.warns(NoEffectWarning, match="Late.on_before_zero_grad reads the gradients after the forward pass"):
        assert fit(Late(), GradToNone()).held[1]
    module = Late()
    module.on_before_zero_grad = None
    assert not fit(module, GradToNone()).held[1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
@pytest.mark.parametrize("make", [GradToNone, Preemption])
def test_teardown_of_a_copied_trainer_does_not_change_the_original(make, duplicate):
    """A Trainer that is copied or sent to another process calls teardown again."""
    callback, undone = make(), []
    callback._cleanup.callback(undone.append, "once")
    duplicate(callback).teardown(None, None, "fit")
    assert undone == []
    callback.teardown(None, None, "fit")
    assert undone == ["once"]


def test_grad_to_none_leaves_nothing_on_optimizers_and_strategy():
    trainer = quiet_trainer(max_epochs=1, callbacks=[GradToNone()])
    trainer.fit(Net(), batches(6), batches(3))
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    assert "training_step" not in vars(trainer.strategy)
