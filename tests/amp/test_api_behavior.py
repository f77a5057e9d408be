"""Every fact of tests/recorded/apex/api_behavior.json: this library has the same value or the same kind of error."""

import builtins
import contextlib
import functools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_turbo import amp
from tests.amp import loops
from tests.amp.loops import INF, LEVELS, net, sgd
from tests.amp.recorded import round_weights

FACTS = {
    fact["id"]: fact
    for fact in json.loads((Path(__file__).parents[1] / "recorded" / "apex" / "api_behavior.json").read_text())["facts"]
    if not fact.get("version_artifact")
}
HALF = torch.float16

# Intended differences: id -> (value or type of error in this library, reason).
OWN_MASTER = "at O2 a parameter is float32 outside of calls, and its own master"
DIFFERENT = {
    "promote_double_float": ("float64", "apex's promotion knew no float64; torch's own gives float64"),
    "promote_half_bfloat16": ("float32", "apex's promotion knew no bfloat16; torch's own gives float32"),
    "iadd_half_float": (["float16", True], "x += y changes x in place, as everywhere in torch"),
    "zero_grad_set_to_none_O2": ("ok", "set_to_none=True is a good wish at every level"),
    "lazy_O2": ([["float32"] * 6, ["float32"] * 6], OWN_MASTER),
    "O1_cache_identity": (
        ["float16", False, False],
        "a kept cast would be stale after load_state_dict or a change under no_grad",
    ),
    "double_optimizer_param_O2": (TypeError, "refused by initialize already, not at the first backward"),
    "bfloat16_model_O2": (RuntimeError, "parameters are the masters, which half precision serves badly: refused"),
    "half_buffer_O1": (None, "what is half already and does not train is let be"),
    "bn_affine_false_O2": (
        {"1.running_mean": "float32", "1.running_var": "float32", "1.num_batches_tracked": "int64"},
        "a module without weights keeps its buffers, which positions and sums need",
    ),
    "norms_O2": (
        {
            **{f"{name}.{kind}": "float16" for name in ("ln", "gn") for kind in ("weight", "bias")},
            **{f"{name}.{kind}": "float32" for name in ("sbn", "in") for kind in ("weight", "bias")},
            **{f"{name}.running_{kind}": "float32" for name in ("sbn", "in") for kind in ("mean", "var")},
            **{f"{name}.num_batches_tracked": "int64" for name in ("sbn", "in")},
        },
        "an instance norm that accumulates statistics is float32, or they would freeze",
    ),
    "zero_grad_effect_O2": ([["none"], ["none"]], OWN_MASTER + ": zero_grad is torch's own"),
    "after_skip_grads_O2": ([[False] * 6] * 2, OWN_MASTER + ": gradients stay until zero_grad, as at O1"),
    "after_step_grads_O2": ([[False] * 6] * 2, OWN_MASTER + ": gradients stay until zero_grad, as at O1"),
    "model_grads_scaled_O2": (1.0, OWN_MASTER),
    "frozen_O2": (["float32"] * 6, OWN_MASTER),
    "state_dict_hook_O2": ([["float32"] * 6, ["float16"] * 6, True, True], OWN_MASTER + ", which a checkpoint holds"),
    "submodule_call_O2": ("float32", "a part that is called outside of the model's call computes in float32"),
    "add_param_group_O2": (["float16", "float16"], "an optimizer keeps the parameters that it is given"),
}


def init(models, optimizers=None, level="O1", **kwargs):
    result = loops.init(models, optimizers, level, **kwargs)
    round_weights(models, level)
    return result


def ready(level="O1", model=None, make=sgd, **kwargs):
    model = net() if model is None else model
    optimizer = make(model)
    init(model, optimizer, level, **kwargs)
    return model, optimizer


def backward(model, optimizer, factor=1.0, **kwargs):
    loss = model(torch.ones(3, 4)).float().pow(2).mean() * factor
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
        scaled.backward()


def passed(level, factor=1.0, **kwargs):
    """Return the model and optimizer after a backward pass, which overflows if the factor is inf."""
    model, optimizer = ready(level, **kwargs)
    backward(model, optimizer, factor)
    return model, optimizer


def dtypes(tensors):
    return [str(t.dtype).removeprefix("torch.") for t in tensors]


def dtype(tensor):
    return dtypes([tensor])[0]


def masters(optimizer):
    return list(amp.master_params(optimizer))


def output(level, **kwargs):
    return dtype(ready(level, **kwargs)[0](torch.ones(3, 4)))


def inside(model):
    """Return the dtypes of parameters and buffers by name during a call of the model."""
    seen = {}

    def look(module, args):
        seen.update({k: dtype(v) for k, v in (*module.named_parameters(), *module.named_buffers())})

    handle = model.register_forward_pre_hook(look)
    with contextlib.suppress(NotImplementedError, RuntimeError):
        model(torch.ones(3, 4))
    handle.remove()
    return seen


def state():
    return {key: dict(value) for key, value in amp.state_dict().items()}


def state_after(level="O1", factors=(), **kwargs):
    """Return the state of the scalers after steps whose losses were multiplied by these factors."""
    model, optimizer = ready(level, **kwargs)
    for factor in factors:
        backward(model, optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()
    return state()


def kept_norm(level, keep):
    model, _ = ready(level, net(nn.BatchNorm1d(8)), keep_batchnorm_fp32=keep)
    return [inside(model)[name] for name, _ in model.named_parameters()]


def loaded(value, **kwargs):
    ready("O1", **kwargs)
    amp.load_state_dict(value)
    return state()


def under_O1(function, *kinds):
    """Return the dtype of a function's result for tensors of these dtypes."""
    ready("O1")
    return dtype(function(*(torch.full((3, 3), 0.5, dtype=kind) for kind in kinds)))


def pair_of(around_model, around_optimizer):
    model = net()
    pair = init(around_model(model), around_optimizer(sgd(model)))
    return [type(part).__name__ for part in pair]


def kinds_of_gradients(params):
    return sorted({"none" if p.grad is None else "zeros" if not p.grad.any() else "other" for p in params})


ONE = {"loss_scale": 1024.0, "unskipped": 7}

# Facts of one expression.
CHECKS = {
    # Levels, models and optimizers that raise an error
    "opt_level_01": lambda: ready("01"),
    "opt_level_O4": lambda: ready("O4"),
    "opt_level_lower": lambda: ready("o1"),
    "opt_level_int": lambda: ready(1),
    "double_model_O1": lambda: init(net().double()) and None,
    "double_model_O2_init": lambda: sorted(set(inside(ready("O2", net().double())[0]).values())),
    "bfloat16_model_O2": lambda: ready("O2", net().bfloat16()),
    "data_parallel_O1": lambda: ready("O1", nn.DataParallel(net())),
    "data_parallel_O2": lambda: ready("O2", nn.DataParallel(net())),
    "data_parallel_after": lambda: dtype(nn.DataParallel(ready("O1")[0])(torch.ones(3, 4))),
    "optimizer_wrong_type": lambda: init(net(), "sgd"),
    "optimizer_tuple": lambda: init(net(), (sgd(net()),)),
    "model_wrong_type": lambda: init((lambda x: x), sgd(net())),
    "model_tuple": lambda: init((net(),), sgd(net())),
    "same_optimizer_twice": lambda: init(*ready("O1")),
    # Overrides
    "loss_scale_foo": lambda: state_after(loss_scale="foo"),
    "loss_scale_str": lambda: state_after(loss_scale="128.0"),
    "loss_scale_int": lambda: [(one := state_after(loss_scale=128)["loss_scaler0"]), type(one["loss_scale"]).__name__],
    "loss_scale_str_dynamic_O3": lambda: state_after("O3", loss_scale="dynamic"),
    "keep_bn_maybe": lambda: kept_norm("O2", "maybe"),
    "keep_bn_str_true": lambda: kept_norm("O3", "True"),
    "keep_bn_str_false": lambda: kept_norm("O2", "False"),
    "keep_bn_int1": lambda: kept_norm("O2", 1),
    "keep_bn_true_O1": lambda: kept_norm("O1", True),
    "keep_bn_false_O1": lambda: kept_norm("O1", False),
    "keep_bn_true_O0": lambda: sorted(set(kept_norm("O0", True))),
    "cast_model_half_O1": lambda: output("O1", cast_model_type=HALF),
    "cast_model_float_O1": lambda: output("O1", cast_model_type=torch.float32),
    "patch_false_O1": lambda: output("O1", patch_torch_functions=False),
    "patch_true_O2": lambda: output("O2", patch_torch_functions=True),
    "patch_true_O0": lambda: output("O0", patch_torch_functions=True),
    "cast_outputs_half_O1": lambda: output("O1", cast_model_outputs=HALF),
    "cast_outputs_float_O1": lambda: output("O1", cast_model_outputs=torch.float32),
    "cast_outputs_half_O2": lambda: output("O2", cast_model_outputs=HALF),
    "num_losses_3": lambda: state_after(num_losses=3),
    "max_below_init": lambda: state_after(max_loss_scale=1024),
    "min_above_init": lambda: state_after(min_loss_scale=2**20),
    "min_above_init_overflow": lambda: state_after(factors=[INF], min_loss_scale=2**20),
    # Return values, and calls in the wrong order
    "optimizer_none": lambda: type(init(net(), level="O2")).__name__,
    "optimizer_list": lambda: pair_of(lambda model: model, lambda optimizer: [optimizer]),
    "model_list": lambda: pair_of(lambda model: [model], lambda optimizer: optimizer),
    "loss_id_out_of_range": lambda: backward(*ready("O1"), loss_id=1),
    "scale_loss_before_init": lambda: backward(net(), sgd(net())),
    "state_dict_before_init": amp.state_dict,
    "enabled_false_state_dict": lambda: (ready("O1", enabled=False), amp.state_dict()),
    "submodule_state_dict_O2": lambda: dtypes(ready("O2")[0][0].state_dict().values()),
    "submodule_call_O2": lambda: dtype(ready("O2")[0][0](torch.ones(3, 4))),
    # State of the scalers
    "state_dict_O0": lambda: state_after("O0", [1.0, 1.0]),
    "state_dict_O3": lambda: state_after("O3", [1.0, 1.0]),
    "state_dict_O2_overflow": lambda: state_after("O2", [1.0, 1.0, INF, 1.0]),
    "state_dict_static": lambda: state_after("O2", [1.0, 1.0], loss_scale=128.0),
    "load_state_dict": lambda: loaded({"loss_scaler0": ONE}),
    "load_state_dict_above_max": lambda: loaded(
        {"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 0}}, max_loss_scale=2.0**17
    ),
    "load_state_dict_unexpected_key": lambda: loaded({"loss_scaler0": ONE, "foo": 1}),
    "load_state_dict_too_many": lambda: loaded({"loss_scaler0": ONE, "loss_scaler1": ONE}),
    "load_state_dict_missing_field": lambda: loaded({"loss_scaler0": {"loss_scale": 1024.0}}),
    # Functions of O1
    "banned_bce_half": lambda: under_O1(F.binary_cross_entropy, HALF, HALF),
    "banned_bce_float": lambda: under_O1(F.binary_cross_entropy, torch.float32, torch.float32),
    "inplace_exp_half": lambda: under_O1(torch.Tensor.exp_, HALF),
    "promote_double_float": lambda: under_O1(torch.add, torch.float64, torch.float32),
    "promote_half_bfloat16": lambda: under_O1(torch.add, HALF, torch.bfloat16),
    "linear_double": lambda: under_O1(F.linear, torch.float64, torch.float64),
    "register_unknown": lambda: amp.register_half_function(torch, "no_such_function"),
}


def fact(function):
    """Register a function as the check of the fact with its name."""
    CHECKS[function.__name__] = function
    return function


def of_levels(function):
    """Register a function as the check of a fact at each level."""
    for level in LEVELS:
        CHECKS[f"{function.__name__}_{level}"] = functools.partial(function, level)
    return function


@of_levels
def half_model(level):
    ready(level, net().half())


@fact
def half_buffer_O1():
    model = net()
    model.register_buffer("b", torch.zeros(1, dtype=HALF))
    ready("O1", model)


@fact
def double_optimizer_param_O2():
    foreign = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ready("O2", make=lambda model: torch.optim.SGD([*model.parameters(), foreign], lr=0.1))


def master_weights(level, value):
    return dtypes(masters(passed(level, master_weights=value)[1]))


for _value, _level in ((True, "O1"), (False, "O1"), (True, "O3"), (False, "O2")):
    CHECKS[f"master_weights_{str(_value).lower()}_{_level}"] = functools.partial(master_weights, _level, _value)


@fact
def same_objects():
    result = {}
    for level in LEVELS:
        model = net()
        optimizer = sgd(model)
        pair = init(model, optimizer, level)
        result[level] = [pair[0] is model, pair[1] is optimizer]
    return result


@fact
def enabled_false():
    model = net()
    optimizer = sgd(model)
    pair = init(model, optimizer, enabled=False)
    loss = model(torch.ones(3, 4)).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        same = scaled is loss
    return [pair[0] is model, pair[1] is optimizer, same, sorted(set(dtypes(model.state_dict().values())))]


# The optimizer's methods


def closure_step(level, factor):
    passed(level, factor, loss_scale="dynamic")[1].step(lambda: torch.tensor(0.0))
    return "ok"


def gradients_after(level, factor):
    model, optimizer = passed(level, factor, loss_scale="dynamic")
    optimizer.step()
    return [[p.grad is None for p in params] for params in (model.parameters(), masters(optimizer))]


for _level in LEVELS:
    CHECKS[f"closure_normal_step_{_level}"] = functools.partial(closure_step, _level, 1.0)
    CHECKS[f"closure_skipped_step_{_level}"] = functools.partial(closure_step, _level, INF)
    CHECKS[f"after_step_grads_{_level}"] = functools.partial(gradients_after, _level, 1.0)
    CHECKS[f"after_skip_grads_{_level}"] = functools.partial(gradients_after, _level, INF)


@of_levels
def zero_grad_set_to_none(level):
    model, optimizer = passed(level)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in (*model.parameters(), *masters(optimizer)))
    return "ok"


@of_levels
def zero_grad_effect(level):
    model, optimizer = passed(level)
    optimizer.zero_grad()
    return [kinds_of_gradients(model.parameters()), kinds_of_gradients(masters(optimizer))]


@of_levels
def step_return(level):
    return passed(level, INF, loss_scale="dynamic")[1].step()


@of_levels
def lazy(level):
    _, optimizer = ready(level)
    before = dtypes(masters(optimizer))
    optimizer.zero_grad()
    return [before, dtypes(masters(optimizer))]


@of_levels
def model_grads_scaled(level):
    model, optimizer = passed(level, loss_scale="dynamic")
    own, master = next(model.parameters()), masters(optimizer)[0]
    return round(float(own.grad.double().norm() / master.grad.double().norm()), 6)


@of_levels
def io_dtypes(level):
    model, _ = ready(level)
    return [dtype(model(torch.ones(3, 4, dtype=d))) for d in (torch.float32, HALF, torch.float64)]


@of_levels
def step_before_backward_scale(level):
    model, optimizer = ready(level)
    loss = (model(torch.ones(3, 4)).float().mean() * 0 + 1).half()
    with amp.scale_loss(loss, optimizer) as scaled:
        result = [dtype(scaled), float(scaled.detach()) / float(loss.detach())]
        scaled.backward()
    return result


def momentum(optimizer):
    return [dtype(optimizer.state[p]["momentum_buffer"]) for p in masters(optimizer)]


@of_levels
def momentum_dtype(level):
    _, optimizer = passed(level)
    optimizer.step()
    return momentum(optimizer)


@of_levels
def preexisting_state(level):
    model = net()
    optimizer = sgd(model)
    model(torch.ones(3, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    init(model, optimizer, level)
    backward(model, optimizer)
    optimizer.step()
    return momentum(optimizer)


@of_levels
def adam_dtype(level):
    _, optimizer = passed(level, make=lambda model: torch.optim.Adam(model.parameters()))
    optimizer.step()
    return [{k: dtype(v) for k, v in optimizer.state[p].items()} for p in masters(optimizer)]


# Models at O2


@fact
def master_start_values_O2():
    initial = [p.detach().clone() for p in net().parameters()]
    own = masters(ready("O2")[1])
    rounded = all(torch.equal(m, w.half().float()) for m, w in zip(own, initial, strict=True))
    return [rounded, all(torch.equal(m, w) for m, w in zip(own, initial, strict=True))]


@fact
def frozen_O2():
    model = net()
    model[0].requires_grad_(False)
    return dtypes(masters(ready("O2", model)[1]))


@fact
def state_dict_hook_O2():
    model, optimizer = ready("O2")
    for _ in range(3):
        backward(model, optimizer)
        optimizer.step()
    saved = list(model.state_dict().values())
    is_half = all(torch.equal(s, p.float()) for s, p in zip(saved, model.parameters(), strict=True))
    is_master = all(torch.equal(s, m) for s, m in zip(saved, masters(optimizer), strict=True))
    return [dtypes(saved), list(inside(model).values()), is_half, is_master]


def norm_parts(affine):
    model, _ = ready("O2", net(nn.BatchNorm1d(8, affine=affine)))
    seen = inside(model)  # of the first call: from the second call on, buffers that a call writes to are float32
    return [{k: seen[k] for k, _ in part} for part in (model.named_parameters(), model.named_buffers())]


CHECKS["bn_conversion_O2"] = lambda: norm_parts(True)
CHECKS["bn_affine_false_O2"] = lambda: norm_parts(False)[1]


@fact
def norms_O2():
    norms = {
        "ln": nn.LayerNorm(4), "gn": nn.GroupNorm(2, 4), "sbn": nn.SyncBatchNorm(4),
        "in": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    }  # fmt: skip
    return inside(ready("O2", nn.ModuleDict(norms))[0])


class Echo(nn.Module):
    """Returns the result of a function of its arguments."""

    def __init__(self, function):
        super().__init__()
        self.lin, self.function = nn.Linear(2, 2), function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@fact
def int_input_O2():
    model, _ = ready("O2", nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)))
    return dtype(model(torch.tensor([1, 2])))


@fact
def nested_io_O2():
    def forward(value, *, extra):
        first, (second,) = value["a"], value["b"]
        assert dtypes([first, second, extra]) == ["float16"] * 3
        return {"x": first, "y": [second, extra], "z": ("a", torch.tensor(1))}

    model, _ = ready("O2", Echo(forward))
    out = model({"a": torch.ones(2), "b": (torch.ones(2),)}, extra=torch.ones(2))
    return [type(out).__name__, dtype(out["x"]), dtypes(out["y"]), [out["z"][0], dtype(out["z"][1])]]


@fact
def none_input_O2():
    model, _ = ready("O2", Echo(lambda x, nothing, number: [x, nothing is None and number == 0.5]))
    out = model(torch.ones(2), None, 0.5)
    return [dtype(out[0]), out[1]]


@fact
def add_param_group_O2():
    _, optimizer = passed("O2")
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=HALF))]})
    before = dtype(optimizer.param_groups[1]["params"][0])
    optimizer.zero_grad()
    return [before, dtype(optimizer.param_groups[1]["params"][0])]


@fact
def state_dict_O1():
    value, raw = state_after("O1", [1.0, 1.0]), amp.state_dict()
    kinds = [{k: type(v).__name__ for k, v in each.items()} for each in (raw, raw["loss_scaler0"])]
    return [value, type(raw).__name__, *kinds]


@fact
def state_dict_destination():
    ready("O1")
    target = OrderedDict()
    return [amp.state_dict(destination=target) is target, dict(target)]


# Functions of O1


@fact
def iadd_half_float():
    ready("O1")
    original = x = torch.ones(2, dtype=HALF)
    x += torch.ones(2)
    return [dtype(x), bool((original == 2).all())]


@fact
def disable_casts():
    ready("O1")
    with amp.disable_casts():
        uncast = dtype(F.linear(torch.ones(2, 3), torch.ones(4, 3)))
    return [uncast, dtype(F.linear(torch.ones(2, 3), torch.ones(4, 3)))]


@fact
def half_function():
    half, single, widest = (
        decorate(lambda *tensors: dtypes(tensors))
        for decorate in (amp.half_function, amp.float_function, amp.promote_function)
    )
    ready("O1")
    narrow, wide = torch.ones(2, dtype=HALF), torch.ones(2)
    return [half(wide)[0], single(narrow)[0], widest(narrow, wide)]


class Namespace:
    """Stands for a Python module of the user."""


@fact
def register_half():
    space = Namespace()
    space.f = dtype
    amp.register_half_function(space, "f")
    ready("O1")
    received = space.f(torch.ones(2))
    amp.shutdown()
    assert space.f is dtype
    return received


@fact
def O1_cache_identity():
    seen = []

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            out = F.linear(x, self.weight)
            seen.append(out.grad_fn)
            return out

    # Autocast casts below Python, so the cast is visible only in the graph. Both calls share one cast of the weight.
    layer, optimizer = ready("O1", Layer())
    loss = (layer(torch.ones(1, 2)) + layer(torch.ones(1, 2))).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    layer(torch.ones(1, 2))
    casts = [node.next_functions[1][0].next_functions[0][0] for node in seen]
    return ["float16" if "ToCopy" in casts[0].name() else casts[0].name(), casts[0] is casts[1], casts[0] is casts[2]]


@fact
def O1_optimizer_step_uncast():
    seen = []

    class Custom(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(dtype(F.linear(torch.ones(1, 2), torch.ones(3, 2))))

    passed("O1", make=lambda model: Custom(model.parameters(), lr=0.1))[1].step()
    return seen[0]


@pytest.mark.parametrize("name", FACTS)
def test_behavior_equals_that_of_apex(name):
    expected, raises = FACTS[name].get("value"), FACTS[name]["raises"]
    if name in DIFFERENT:
        value, _ = DIFFERENT[name]
        raises = value.__name__ if isinstance(value, type) else None
        expected = None if raises else value
    if not raises:
        assert CHECKS[name]() == expected
        return
    with pytest.raises(getattr(builtins, raises)) as caught:
        CHECKS[name]()
    words = str(caught.value)
    assert "lightning_turbo" in str(caught.traceback[-1].path)
    assert len(words) > 40 or isinstance(caught.value, KeyError), words


def test_every_recorded_behavior_of_apex_is_checked():
    assert set(CHECKS) == set(FACTS)
    assert set(DIFFERENT) <= set(CHECKS)
