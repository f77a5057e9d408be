"""Weights in the training step at O3, which are half outside of calls too, compared with O2."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from lightning_turbo import ApexAMP, amp
from lightning_turbo.amp import casts
from lightning_turbo.errors import AmpUsageError
from tests.integration.regression import Regression, apart, fit


class Own(Regression):
    """Its step uses its own weight, calls ``forward`` directly, or calls the network through a wrapper."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.full((1, 1), 0.5))
        if way == "wrapped":
            plain = self.net.forward
            self.net.forward = lambda x: plain(x)

    def loss(self, batch):
        run = {"own": self.net, "forward": self.net[0].forward, "layers": self.net.forward, "wrapped": self.net}[
            self.way
        ]
        out = run(batch[0]) if self.way != "forward" else self.net[2].forward(torch.tanh(run(batch[0])))
        return nn.functional.mse_loss((out @ self.weight).float(), batch[1].float())


@pytest.mark.parametrize("way", ["own", "forward", "layers", "wrapped"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_step_uses_weights_outside_of_calls(way, level):
    if (way, level) == ("forward", "O3"):  # half weights meet a float32 input
        with pytest.raises(RuntimeError, match=r"call the layer itself"):
            fit(Own(way), ApexAMP(level))
        return
    wanted, true = fit(Own(way)), fit(Own(way), precision="bf16-true")
    limit = 0.06 if level == "O2" else max(0.06, 1.5 * apart(true, wanted, Own(way)))
    assert apart(fit(Own(way), ApexAMP(level)), wanted, Own(way)) < limit


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Bilinear(4, 4, 4)])
def test_at_o3_a_layer_that_autocast_does_not_cast_must_be_called(layer, by_name):
    class Model(Regression):
        def loss(self, batch):
            run = self.net[0].forward if by_name else self.net[0]
            return nn.functional.mse_loss(self.net[1:](run(*[batch[0]] * self.inputs)), batch[1])

    module = Model()
    module.net.insert(0, copy.deepcopy(layer))
    module.inputs = 1 + isinstance(layer, nn.Bilinear)
    with pytest.raises(RuntimeError, match=r"call the layer itself") if by_name else contextlib.nullcontext():
        fit(module, ApexAMP("O3"), max_epochs=1)


class Kept(nn.Module):
    """Records the dtype that it computes in. Calls another module, or itself."""

    def __init__(self, below=None):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.below, self.seen = nn.Parameter(torch.eye(4)), below, set()

    def forward(self, x, again=0):
        inner = self(x, again - 1) if again else x if self.below is None else self.below(x)
        self.seen.add((inner @ self.weight).dtype)
        return inner @ self.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_modules_called_in_a_step_compute_in_the_dtype_of_the_level(level, dtype):
    class Model(Regression):
        def __init__(self):
            super().__init__()
            self.kept, self.cast = Kept(Kept()), Kept()
            self.seen = set()

        def loss(self, batch):
            with pytest.raises(RuntimeError):
                self.kept(batch[0][:, :3])
            hidden = self.cast(self.kept(batch[0], again=2))
            self.seen.add((hidden @ hidden.T).dtype)
            return nn.functional.mse_loss(self.net(hidden), batch[1])

    module = fit(Model(), ApexAMP(level, dtype=dtype, loss_scale=1.0, keep_fp32_modules=["kept"]))
    assert module.kept.seen == module.kept.below.seen == {torch.float32}
    assert module.cast.seen == {dtype}
    assert module.seen == {torch.float32}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("keep", [["net.last"], ["net.first", "net.last"], [nn.Embedding]])
def test_a_kept_module_may_share_its_weight(keep, level):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.last.weight = self.first.weight

        def forward(self, ids):
            return self.last(torch.tanh(self.first(ids)))

    class Model(Regression):
        def __init__(self):
            super().__init__()
            self.net = Language()

        def loss(self, batch):
            ids = batch[0].abs().mul(3).long().clamp(max=9)
            return nn.functional.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    module = fit(Model(), ApexAMP(level, keep_fp32_modules=keep))
    assert module.net.last.weight is module.net.first.weight
    assert apart(module, fit(Model()), Model()) < 0.06


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("inside", [True, False])
def test_class_weights_of_a_loss_within_a_network(level, inside):
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 3)
            self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.1]))

        def forward(self, x, target):
            return self.criterion(self.net(x), target)

    class Model(Regression):
        def __init__(self):
            super().__init__()
            self.net = Task()

        def loss(self, batch):
            target = batch[0].sum(1).ge(0).long()
            task = self.net
            return task(batch[0], target) if inside else task.criterion(task.net(batch[0]), target)

    assert apart(fit(Model(), ApexAMP(level)), fit(Model()), Model()) < (0.25 if level == "O3" else 0.06)


def fused_sgd(params):
    return torch.optim.SGD(params, lr=0.02, momentum=0.9, fused=True)


class Fused(Regression):
    def configure_optimizers(self):
        return fused_sgd(self.parameters())


@pytest.mark.parametrize("moves", [True, False])
def test_a_fused_sgd_that_does_not_update_half_weights_is_refused(moves, monkeypatch):
    monkeypatch.setattr(casts, "_moves_half_weights", lambda: moves)
    net, said = nn.Linear(4, 2), r"O3: expected an SGD that updates half weights.*Leave out fused=True, or use O2"
    for level in ("O2", "O3"):
        with contextlib.nullcontext() if moves or level == "O2" else pytest.raises(AmpUsageError, match=said):
            amp.initialize(net, fused_sgd(net.parameters()), opt_level=level, verbosity=0)
        amp.shutdown()
        with contextlib.nullcontext() if moves or level == "O2" else pytest.raises(AmpUsageError, match=said):
            fit(module := Fused(), ApexAMP(level), max_epochs=1)
        assert {p.dtype for p in (*net.parameters(), *module.parameters())} == {torch.float32}


def test_a_trial_step_shows_whether_a_fused_sgd_updates_half_weights():
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0, fused=True).step()
    assert casts._moves_half_weights() is not bool(weight.any())
