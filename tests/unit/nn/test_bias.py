"""Biases before batch norm: which go, which stay, and that no number changes."""

import copy
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lightning_turbo._random import changed_generators as moved
from lightning_turbo._random import shared_state
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.nn import drop_bias_before_norm


class Residual(nn.Module):
    """Norms registered before the layers, and called in another order."""

    def __init__(self, channels=4):
        super().__init__()
        self.norm_b, self.norm_a = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 2, 1)  # before no norm

    def forward(self, x):
        x = F.relu(self.norm_a(self.first(x)))
        return self.last(x + self.norm_b(self.second(x)))


def warmed(module, *inputs, steps=3):
    """Gives the norms statistics and the biases values of their own."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        for _ in range(steps):
            module(*[torch.randn_like(x) for x in inputs])
    return module


def losses(module, x, steps=6):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module(x) * torch.linspace(-1, 1, module(x).numel()).reshape(module(x).shape)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_the_graph_decides_not_names_or_order():
    report = drop_bias_before_norm(Residual())
    assert report.dropped == {"first": "norm_a", "second": "norm_b"}
    assert report.parameters == 8
    assert str(report).splitlines()[0] == "2 biases dropped, 8 parameters:"


def test_evaluation_gives_the_same_numbers():
    x = torch.randn(2, 3, 8, 8)
    net = warmed(Residual(), x).eval()
    expected = net(x)
    net.train()
    drop_bias_before_norm(net)
    torch.testing.assert_close(net.eval()(x), expected, rtol=1e-5, atol=1e-5)  # float32 adds in another order


def test_training_gives_the_same_losses():
    x = torch.randn(4, 3, 8, 8)
    with_bias = warmed(Residual(), x)
    without = copy.deepcopy(with_bias)
    drop_bias_before_norm(without)
    expected, got = losses(with_bias, x), losses(without, x)
    assert got == pytest.approx(expected, rel=1e-5)  # float32 rounding, a few steps long
    assert got[-1] < got[0]
    torch.testing.assert_close(without.eval()(x), with_bias.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(3, 4, 3), nn.BatchNorm1d, (2, 3, 9)),
        (nn.Conv3d(3, 4, 3), nn.BatchNorm3d, (2, 3, 5, 5, 5)),
        (nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d, (2, 3, 5, 5)),
    ],
)
def test_every_kind_of_convolution(layer, norm, shape, momentum):
    x = torch.randn(shape)
    net = warmed(nn.Sequential(copy.deepcopy(layer), nn.Identity(), norm(4, momentum=momentum), nn.ReLU()), x)
    expected = copy.deepcopy(net).eval()(x)
    assert drop_bias_before_norm(net).dropped == {"0": "2"}
    torch.testing.assert_close(copy.deepcopy(net).eval()(x), expected, rtol=1e-5, atol=1e-5)


def test_a_norm_without_running_statistics():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    x = torch.randn(2, 3, 4, 4)
    expected = net(x)
    assert drop_bias_before_norm(net).dropped
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-5)


# Linear layers: batch norm runs over dimension 1.


def test_a_linear_layer_needs_to_be_flat_for_sure():
    flat = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)
    )
    assert drop_bias_before_norm(flat).dropped == {"1": "2", "4": "5"}
    unknown = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(NoEffectWarning, match="more than two dimensions; give example_inputs"):
        drop_bias_before_norm(unknown)
    with pytest.warns(NoEffectWarning, match="its output has 3 dimensions"):
        drop_bias_before_norm(unknown, (torch.randn(2, 4, 4),))
    mean = unknown[1].running_mean.clone()
    assert drop_bias_before_norm(copy.deepcopy(unknown), (torch.randn(2, 4),)).dropped == {"0": "1"}
    assert torch.equal(unknown[1].running_mean, mean)


class Flattens(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how, self.layer, self.norm = how, nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(torch.flatten(x.flatten(**self.how), **self.how)))


def test_the_first_dimensions_may_be_flattened_too():
    x = torch.randn(2, 3, 4, 3)
    net = Flattens(end_dim=1)  # (2, 3, 4, 3) -> (6, 4, 3) -> (24, 3), and of five dimensions three are left
    with pytest.warns(NoEffectWarning, match="more than two dimensions; give example_inputs"):
        drop_bias_before_norm(net)
    with pytest.warns(NoEffectWarning, match="its output has 3 dimensions"):
        drop_bias_before_norm(net, (x[None],))
    assert drop_bias_before_norm(net, (x,)).dropped == {"layer": "norm"}
    assert drop_bias_before_norm(Flattens(start_dim=1)).dropped == {"layer": "norm"}


def test_example_inputs_are_a_tuple():
    with pytest.raises(TypeError, match=r"example_inputs is a Tensor; accepted is a tuple"):
        drop_bias_before_norm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.ones(4, 2))


def test_example_inputs_leave_statistics_and_random_numbers_alone():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(3, 4)
    bias = net[1].bias.detach().clone()
    state = torch.get_rng_state()
    drop_bias_before_norm(net, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(net[2].running_mean, -bias)
    assert net[2].num_batches_tracked == 0


def test_example_inputs_on_the_cpu_touch_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drop_bias_before_norm(net, (torch.randn(3, 4),)).dropped == {"0": "1"}


# What has to stay.


class OutputUsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class CalledTwice(OutputUsedTwice):
    def forward(self, x):
        return self.norm(self.conv(x)) + self.conv(x).mean()


class BiasReadElsewhere(OutputUsedTwice):
    def forward(self, x):
        return self.norm(self.conv(x)) * self.conv.bias.sum()


class NormCalledTwice(OutputUsedTwice):
    def forward(self, x):
        return self.norm(self.norm(self.conv(x)))


class TiedBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.other.bias = self.conv.bias

    def forward(self, x):
        return self.other(self.norm(self.conv(x)))


class TwoNames(OutputUsedTwice):
    def __init__(self):
        super().__init__()
        self.again = self.conv

    def forward(self, x):
        return self.norm(self.conv(x))


class Opaque(nn.Module):
    """Branches on values, so that it cannot be traced."""

    def __init__(self, conv):
        super().__init__()
        self.conv, self.norm = conv, nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y if y.sum() > 0 else -y


class HalfOpaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.norm, self.body = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), Opaque(nn.Conv2d(4, 4, 1))

    def forward(self, x):
        return self.body(self.norm(self.head(x)))


class SharedWithOpaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.body = Opaque(self.conv)

    def forward(self, x):
        return self.body(self.norm(self.conv(x)))


def frozen_norm():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    net[1].eval()
    return net


def hooked():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    net[0].register_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OutputUsedTwice, "its output is also used elsewhere"),
        (CalledTwice, "used more than once"),
        (BiasReadElsewhere, "its bias is also used elsewhere"),
        (NormCalledTwice, "used more than once"),
        (TiedBias, "its bias is also used elsewhere"),
        (TwoNames, "used more than once"),
        (SharedWithOpaque, "used more than once"),
        (frozen_norm, "evaluation mode, where nothing is cancelled"),
        (hooked, "a hook looks at what goes through it"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)),
            "stands directly before a batch norm",
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)), "stands directly before"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4)), "stands directly before a batch norm"),
    ],
)
def test_what_is_not_surely_cancelled_stays(make, reason):
    net = make()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.warns(NoEffectWarning, match=reason):
        report = drop_bias_before_norm(net)
    assert not report.dropped
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_what_cannot_be_traced_is_taken_as_it_is():
    net = HalfOpaque()
    assert drop_bias_before_norm(net).dropped == {"head": "norm"}
    assert net.body.conv.bias is not None
    with pytest.raises(ValueError, match=r"forward of Opaque cannot be traced.*on the submodule that holds the layers"):
        drop_bias_before_norm(Opaque(nn.Conv2d(3, 4, 1)))


# What only a closer look at forward shows.


def replaced(index):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Identity(), nn.BatchNorm2d(4))
    forward = net[index].forward
    net[index].forward = lambda x: forward(x).relu()
    return net


def hooked_between():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Identity(), nn.BatchNorm2d(4))
    net[1].register_forward_hook(lambda *args: args[2].relu())
    return net


def hooked_around(index, register):
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1)), nn.Sequential(nn.BatchNorm2d(4)))
    getattr(net[index], register)(lambda *_: None)
    return net


class Stored(OutputUsedTwice):
    def forward(self, x):
        self.features = self.conv(x)
        return self.norm(self.features)


class StoredInAList(OutputUsedTwice):
    def __init__(self):
        super().__init__()
        self.heads, self.levels = [None], {}

    def forward(self, x):
        self.heads[0] = self.levels["first"] = self.conv(x)
        return self.norm(self.heads[0])


class ParametersRead(OutputUsedTwice):
    def forward(self, x):
        return self.norm(self.conv(x)) + sum(p.square().sum() for p in self.parameters())


class BeforeTheNormInEvaluation(OutputUsedTwice):
    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) if self.training else y


class AnotherNormInEvaluation(OutputUsedTwice):
    def __init__(self):
        super().__init__()
        self.other = nn.BatchNorm2d(4)

    def forward(self, x):
        return (self.norm if self.training else self.other)(self.conv(x))


class AnotherLayerInEvaluation(AnotherNormInEvaluation):
    def __init__(self):
        super().__init__()
        self.other = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.norm((self.conv if self.training else self.other)(x))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: replaced(0), "or a forward was replaced"),
        (lambda: replaced(1), "stands directly before a batch norm"),
        (lambda: replaced(2), "or a forward was replaced"),
        (hooked_between, "its output is also used elsewhere"),
        (lambda: hooked_around(0, "register_forward_hook"), "its output is also used elsewhere"),
        (lambda: hooked_around(1, "register_forward_pre_hook"), "its output is also used elsewhere"),
        (Stored, "its output is also used elsewhere"),
        (StoredInAList, "its output is also used elsewhere"),
        (ParametersRead, "its bias is also used elsewhere"),
        (BeforeTheNormInEvaluation, "evaluation goes another way"),
        (AnotherNormInEvaluation, "evaluation goes another way"),
        (AnotherLayerInEvaluation, "evaluation goes another way"),
    ],
)
def test_what_goes_on_beside_the_graph_keeps_the_bias(make, reason):
    net = make()
    with pytest.warns(NoEffectWarning, match=reason):
        assert not drop_bias_before_norm(net).dropped


class Auxiliary(OutputUsedTwice):
    def forward(self, x):
        return self.norm(self.conv(x)) if self.training else x


class OwnSkip(OutputUsedTwice):
    def forward(self, x, skip=None):
        y = self.conv(x)
        return self.norm(y) + (y if skip is None else skip)


class NormIfAsked(OutputUsedTwice):
    def forward(self, x, *, weight=None):
        y = self.conv(x)
        return y if weight is None else self.norm(y) * weight


class RawIfAsked(OutputUsedTwice):
    def forward(self, x, raw=None):
        y = self.conv(x)
        return self.norm(y) if raw is None else y * raw


class AddedIfGiven(OutputUsedTwice):
    def forward(self, x, skip=None):
        y = self.norm(self.conv(x))
        return y if skip is None else y + skip


@pytest.mark.parametrize(("make", "reason"), [
    (OwnSkip, "its output is also used elsewhere"),
    (NormIfAsked, None),
    (RawIfAsked, "training with optional arguments goes another way"),
])  # fmt: skip
def test_optional_arguments_may_be_left_out_and_given(make, reason):
    net, x = make(), torch.randn(2, 3, 4, 4)
    expected, bias = net.eval()(x), net.conv.bias
    with pytest.warns(NoEffectWarning):
        report = drop_bias_before_norm(net.train())
    assert report.kept == ({} if reason is None else {"conv": reason})
    assert net.conv.bias is bias
    assert torch.equal(net.eval()(x), expected)


def test_an_optional_argument_that_changes_nothing_is_no_reason():
    assert drop_bias_before_norm(AddedIfGiven()).dropped == {"conv": "norm"}
    assert drop_bias_before_norm(AddedIfGiven(), (torch.randn(2, 3, 4, 4),)).dropped == {"conv": "norm"}


def test_a_layer_that_evaluation_does_not_call_loses_its_bias():
    assert drop_bias_before_norm(Auxiliary()).dropped == {"conv": "norm"}


class ValuesInEvaluation(OutputUsedTwice):
    def forward(self, x):
        y = self.norm(self.conv(x))
        return y if self.training or y.sum() > 0 else -y


def test_what_only_training_lets_be_traced_is_refused():
    net = ValuesInEvaluation()
    with pytest.raises(ValueError, match="ValuesInEvaluation cannot be traced in evaluation mode"):
        drop_bias_before_norm(net)
    assert all(part.training for part in net.modules())
    with pytest.warns(NoEffectWarning, match="used more than once"):
        drop_bias_before_norm(nn.Sequential(net))


class Moody(OutputUsedTwice):
    """Changes all that a forward can change."""

    def __init__(self, fails):
        super().__init__()
        self.register_buffer("temperature", torch.tensor(1.0))
        self.register_buffer("steps", torch.tensor(0))
        self.outputs, self.count, self.fails = [], 0, fails

    def forward(self, x):
        self.temperature.mul_(0.5)
        self.steps = self.steps + 1
        self.count += 1
        y = self.norm(self.conv(x)) * torch.rand(()) + torch.ones(()).exp()
        self.outputs.append(y)
        self.last = (y, random.random(), np.random.rand())
        return y if not self.fails or y.sum() > 0 else -y


@pytest.mark.parametrize("fails", [False, True])
def test_tracing_leaves_the_module_and_the_random_numbers_alone(fails):
    net = Moody(fails)
    net.norm.eval()
    before = {part: dict(vars(part)) for part in net.modules()}
    steps, state = net.steps, shared_state()
    with pytest.raises(ValueError, match="cannot be traced") if fails else pytest.warns(NoEffectWarning):
        drop_bias_before_norm(net)
    assert {part: dict(vars(part)) for part in net.modules()} == before
    assert net.steps is steps
    assert net.temperature == 1
    assert (net.outputs, net.count) == ([], 0)
    assert moved(state, shared_state()) == []


def test_parameters_that_are_read_leave_nothing_behind():
    net = ParametersRead()
    with pytest.warns(NoEffectWarning):
        drop_bias_before_norm(net, (torch.randn(2, 3, 4, 4),))
    copy.deepcopy(net)
    assert not [name for name in vars(net) if "constant" in name]


def test_a_lazy_layer_is_seen_once_it_has_run():
    net = nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4))
    assert drop_bias_before_norm(net, (torch.randn(3, 5),)).dropped == {"0": "1"}


# A network and a copy of it, paired parameter by parameter.


class Online(nn.Module):
    """A network, the average of it, and a layer of its own; ``calls`` says how often each is called."""

    def __init__(self, calls=(1, 0)):
        super().__init__()
        self.online = nn.Sequential(nested(), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.average = copy.deepcopy(self.online)
        self.own, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
        self.calls = calls

    def forward(self, x):
        parts = (self.online, self.average)
        return self.norm(self.own(sum(part(x) for part, n in zip(parts, self.calls, strict=True) for _ in range(n))))


@pytest.mark.parametrize("calls", [(1, 0), (1, 2), (2, 1)])
def test_a_copy_that_keeps_its_biases_has_them_kept(calls):
    net = Online(calls)
    report = drop_bias_before_norm(net)
    assert report.dropped == {"own": "norm"}
    assert {"online.0.1.0", "online.1"} <= report.kept.keys()
    assert [n for n, _ in net.online.named_parameters()] == [n for n, _ in net.average.named_parameters()]
    if calls == (1, 0):
        assert report.kept["online.1"] == "its counterpart in average, which has the same parameters, keeps its bias"


def test_a_copy_that_loses_its_biases_too_is_no_reason():
    net = Online((1, 1))
    assert drop_bias_before_norm(net).dropped.keys() == {
        "own", "online.0.1.0", "online.1", "average.0.1.0", "average.1"
    }  # fmt: skip


def test_a_copy_beside_the_network_is_looked_for_if_told():
    net = Online()
    with pytest.warns(NoEffectWarning, match="its counterpart in average"):
        drop_bias_before_norm(net.online, within=net)
    assert drop_bias_before_norm(copy.deepcopy(net).online).dropped.keys() == {"0.1.0", "1"}
    with pytest.raises(ValueError, match="within=Conv2d does not hold module=Sequential"):
        drop_bias_before_norm(net.online, within=net.own)


def test_one_block_that_keeps_its_bias_makes_all_like_it_do_so():
    def chain():
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(3)))

    assert len(drop_bias_before_norm(chain()).dropped) == 3
    net = chain()
    net[1][1].eval()
    with pytest.warns(NoEffectWarning, match="1.0: its batch norm is in evaluation mode"):
        assert drop_bias_before_norm(net).kept.keys() == {"0.0", "1.0", "2.0"}


# Checkpoints, old and new.


def nested():
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.Conv2d(4, 1, 1))


@pytest.mark.parametrize("copied", [False, True])
def test_a_checkpoint_with_the_biases_can_be_loaded(copied):
    x = torch.randn(2, 3, 5, 5)
    old = warmed(nested(), x).eval()
    state = old.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    net = nested()
    drop_bias_before_norm(net)
    net = pickle.loads(pickle.dumps(net)) if copied else net
    net.load_state_dict(state)
    torch.testing.assert_close(net.eval()(x), old(x), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(value, kept[name]) for name, value in state.items())  # the checkpoint itself is not touched
    again = nested()
    drop_bias_before_norm(again)
    again.load_state_dict(net.state_dict())  # and a new one as well
    torch.testing.assert_close(again.eval()(x), old(x), rtol=1e-5, atol=1e-5)
    holder = nested()
    drop_bias_before_norm(holder)
    outer = nn.ModuleDict({"outer": holder})
    outer.load_state_dict({f"outer.{name}": value for name, value in kept.items()})
    torch.testing.assert_close(outer.eval()["outer"](x), old(x), rtol=1e-5, atol=1e-5)
    inner = nested()
    drop_bias_before_norm(inner)
    inner[1].load_state_dict(old[1].state_dict())  # the part alone


@pytest.mark.parametrize("copied", [False, True])
def test_the_network_as_it_was_written_loads_what_is_saved(copied):
    x = torch.randn(2, 3, 5, 5)
    net = warmed(nested(), x)
    drop_bias_before_norm(net)
    net = warmed(net, x).eval()
    net = pickle.loads(pickle.dumps(copy.deepcopy(net))) if copied else net
    state = net.half().state_dict()
    assert state["1.0.bias"].dtype is torch.float16
    net.float()
    plain = nested()
    assert net.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(plain.eval()(x), net(x), rtol=1e-5, atol=1e-5)
    outer = nn.ModuleDict({"outer": nested()})
    outer.load_state_dict(nn.ModuleDict({"outer": net}).state_dict())
    net.load_state_dict(net.state_dict())
    assert net[1][0].bias is None


def test_a_layer_that_is_replaced_later_keeps_its_own_bias():
    x = torch.randn(2, 3, 5, 5)
    net = warmed(nested(), x)
    drop_bias_before_norm(net)
    net[1][0] = nn.Conv2d(3, 4, 3)
    again = nested()
    drop_bias_before_norm(again)
    again[1][0] = nn.Conv2d(3, 4, 3)
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(again.eval()(x), net.eval()(x), rtol=0.0, atol=0.0)


def test_a_layer_that_is_fused_later_saves_and_loads_its_bias():
    x = torch.randn(2, 3, 5, 5)
    net, again = warmed(nested(), x), nested()
    for each in (net, again):
        drop_bias_before_norm(each)
        each.eval()
        each[1][0], each[1][1] = fuse_conv_bn_eval(*each[1]), nn.Identity()
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(again(x), net(x), rtol=0.0, atol=0.0)


def test_a_norm_that_is_replaced_later_takes_no_bias_for_cancelled():
    net = nested()
    state = net.state_dict()
    drop_bias_before_norm(net)
    net[1][1] = nn.GroupNorm(2, 4)
    state = {name: value for name, value in state.items() if "running" not in name and "tracked" not in name}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"1\.0\.bias\""):
        net.load_state_dict(state)


def test_a_layer_that_loses_channels_later_saves_as_many_zeros():
    net = nested()
    drop_bias_before_norm(net)
    net[1][0], net[1][1] = nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(2)
    assert net.state_dict()["1.0.bias"].shape == (2,)


def test_a_module_is_needed():
    with pytest.raises(TypeError, match=r"module=3; accepted is a torch.nn.Module"):
        drop_bias_before_norm(3)
    with pytest.raises(TypeError, match=r"within=3; accepted is a torch.nn.Module"):
        drop_bias_before_norm(nn.Linear(2, 2), within=3)


def test_a_part_that_cannot_be_traced_is_named():
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), backend="eager")
    with pytest.warns(NoEffectWarning, match=r"What happens in 0 cannot be traced: call it on the parts in there"):
        drop_bias_before_norm(nn.Sequential(compiled, nn.ReLU()))
