"""ApexAMP in a real Trainer: dtypes, order of hooks, skipped steps, refused arguments."""

import copy
import gc
import types
import weakref

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, ApexGradScaler
from tests.plugins.classifier import HALVES, LEVELS, Net, batches, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Spy(pl.Callback):
    """Records dtypes before backward, when gradients are ready, and of the optimizer state at the end."""

    def __init__(self):
        self.dtypes = {}

    def on_train_end(self, trainer, module):
        self.momentum = {state["momentum_buffer"].dtype for state in trainer.optimizers[0].state.values()}

    def on_before_backward(self, trainer, module, loss):
        self.dtypes = {
            "weight": module.net[0].weight.dtype,
            "norm": module.net[1].weight.dtype,
            "statistics": module.net[1].running_mean.dtype,
            "loss_weight": module.criterion.weight.dtype,
        }

    def on_before_optimizer_step(self, trainer, module, optimizer):
        first = optimizer.param_groups[0]["params"][0]
        assert module.net[0].weight is first
        self.dtypes.update(updated=first.dtype, grad=first.grad.dtype)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_of_weights_gradients_and_states_at_every_level(level, half):
    spy, plugin, model = Spy(), ApexAMP(level, dtype=half), Net()
    before = copy.deepcopy(model.state_dict())
    t = trainer(plugin, callbacks=[spy], max_epochs=2)
    t.fit(model, batches(), batches(32))
    f32 = torch.float32
    expected = dict.fromkeys(("weight", "norm", "statistics", "updated", "grad"), half if level == "O3" else f32)
    assert spy.dtypes == {**expected, "statistics": f32, "loss_weight": f32}  # buffers are half in calls alone
    assert model.seen["loss"] is f32
    assert model.seen["out"] is (half if level == "O1" else f32)
    assert model.seen["val_out"] is model.seen["out"]
    assert spy.momentum == {half if level == "O3" else f32}
    # Everything is restored: float32 weights, and the optimizer has the parameters of the module.
    assert {p.dtype for p in model.parameters()} == {f32}
    assert {state["momentum_buffer"].dtype for state in t.optimizers[0].state.values()} == {f32}
    own = {id(p) for p in model.parameters()}
    assert all(id(p) in own for group in t.optimizers[0].param_groups for p in group["params"])
    assert not torch.equal(model.head.weight, before["head.weight"])
    torch.testing.assert_close(model.frozen.weight, before["frozen.weight"], rtol=0, atol=0 if level != "O3" else 4e-3)
    assert model.losses[-1] < model.losses[0]
    assert {o.dtype for o in t.predict(model, batches(16))} == {half if level == "O1" else f32}
    t.test(model, batches(16), verbose=False)


def test_the_loss_scale_doubles_after_its_window_within_its_limits():
    plugin = ApexAMP("O1", dtype=torch.float16, scaler=ApexGradScaler(growth_interval=2, max_scale=2.0**17))
    trainer(plugin).fit(Net(), batches(96))
    assert plugin.loss_scale == 2.0**17
    assert plugin.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**17, "unskipped": 0}}


@pytest.mark.parametrize(("level", "given"), [("O0", torch.float16), ("O2", torch.float64), ("O3", torch.float16)])
def test_inputs_of_another_dtype_are_cast_to_that_of_the_model(level, given):
    data = [(x.to(given), y) for x, y in batches(32, 8).dataset]
    model = Net()
    trainer(ApexAMP(level)).fit(model, DataLoader(data, batch_size=8))
    assert model.seen["out"] is torch.float32
    assert model.seen["x"] is (torch.float32 if level == "O0" else given)


def test_replaced_optimizers_are_released():
    made = weakref.WeakSet()

    class Restarting(Net):
        def configure_optimizers(self):
            made.add(optimizer := super().configure_optimizers())
            return optimizer

        def on_train_epoch_start(self):
            self.trainer.strategy.setup_optimizers(self.trainer)

        def on_train_end(self):
            gc.collect()
            assert len(made) <= 2

    trainer(ApexAMP("O2", dtype=torch.bfloat16), max_epochs=5).fit(Restarting(), batches())


def test_lbfgs_is_refused_with_a_scaler_and_accepted_at_o0():
    model = Net(optimizer=lambda ps: torch.optim.LBFGS([p for p in ps if p.requires_grad]))
    with pytest.raises(MisconfigurationException, match="runs its closure once per step, got LBFGS"):
        trainer(ApexAMP("O1", dtype=torch.float16)).fit(model, batches(32))
    trainer(ApexAMP("O0")).fit(model, batches(32))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_buffers_are_restored_after_a_move_replaced_them(level):
    """As after a run on a device: the Trainer's move keeps the parameter objects but replaces the buffers."""

    class Move(pl.Callback):
        def on_train_end(self, trainer, module):
            module._apply(torch.clone)

    model = Net()
    model.head.register_buffer("factor", torch.ones(1))
    trainer(ApexAMP(level), callbacks=[Move()]).fit(model, batches(32))
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float32, torch.int64}
    trainer(ApexAMP("O1")).fit(model, batches(32))


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O2", torch.bfloat16)])
def test_a_half_model_is_refused_by_name(level, dtype):
    model = Net()
    model.head.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected a model in float32, got torch.bfloat16 in 'head\.weight'"):
        trainer(ApexAMP(level, dtype=dtype)).fit(model, batches(32))


@pytest.mark.parametrize(("flags", "said"), [
    ({"precision": "16-mixed"}, "leave precision= out; in a further YAML file write precision: null"),
    ({"precision": 32}, "precision=32-true.*leave precision= out"), ({"strategy": "fsdp"}, "(?i)fsdp"),
    ({"strategy": "deepspeed"}, "(?i)deepspeed"),
])  # fmt: skip
def test_flags_that_contradict_the_plugin_are_refused_at_construction(flags, said):
    with pytest.raises(Exception, match=said):
        trainer(ApexAMP("O1"), **flags)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_forward_of_the_lightning_module_casts_its_inputs_and_outputs(level):
    class Direct(Net):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.eye(6))

        def forward(self, x):
            between = self.net(x @ self.gain)
            self.between = between.dtype
            return self.frozen(self.head(between))

    module = Direct()
    module.forward = types.MethodType(type(module).forward, module)
    trainer(ApexAMP(level, dtype=torch.bfloat16)).fit(module, batches())
    assert module.between is torch.bfloat16
    assert module.seen["out"] is torch.float32
