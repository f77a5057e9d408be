"""Every fact of tests/data/apex/api_behaviour.json: the same value or the same kind of error here."""

import builtins
import contextlib
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_turbo import amp
from lightning_turbo.amp.autocast import cache_survives_no_grad

FACTS = {
    fact["id"]: fact
    for fact in json.loads((Path(__file__).parents[2] / "data" / "apex" / "api_behaviour.json").read_text())["facts"]
}
LEVELS = ("O0", "O1", "O2", "O3")

# What differs on purpose: id -> (value here, or the error's type; the reason).
OWN_MASTER = "at O2 a parameter is float32 outside of calls, and its own master"
DIFFERENT = {
    "promote_double_float": ("float64", "apex's promotion knew no float64; torch's own gives float64"),
    "promote_half_bfloat16": ("float32", "apex's promotion knew no bfloat16; torch's own gives float32"),
    "iadd_half_float": (["float16", True], "x += y changes x in place, as everywhere in torch"),
    "zero_grad_set_to_none_O2": ("ok", "set_to_none=True is a good wish at every level"),
    "lazy_O2": ([["float32"] * 6, ["float32"] * 6], OWN_MASTER),
    "O1_cache_identity": (
        ["float16", False, False],
        "a kept cast would be stale after load_state_dict or a change under no_grad; cast_cache=True keeps it",
    ),
    "double_optimizer_param_O2": (TypeError, "refused by initialize already, not at the first backward"),
    "bfloat16_model_O2": (RuntimeError, "parameters are the masters, which half precision serves badly: refused"),
    "zero_grad_effect_O2": ([["none"], ["none"]], OWN_MASTER + ": zero_grad is torch's own"),
    "after_skip_grads_O2": ([[False] * 6] * 2, OWN_MASTER + ": gradients stay until zero_grad, as at O1"),
    "after_step_grads_O2": ([[False] * 6] * 2, OWN_MASTER + ": gradients stay until zero_grad, as at O1"),
    "model_grads_scaled_O2": (1.0, OWN_MASTER),
    "frozen_O2": (["float32"] * 6, OWN_MASTER),
    "state_dict_hook_O2": ([["float32"] * 6, ["float16"] * 6, True, True], OWN_MASTER + ", which a checkpoint holds"),
    "submodule_call_O2": ("float32", "a part that is called outside of the model's call computes in float32"),
    "add_param_group_O2": (["float16", "float16"], "an optimizer keeps the parameters that it is given"),
}

CHECKS = {}


def fact(*ids):
    """Names the facts that a function reproduces; it is called with the id."""

    def keep(function):
        for name in ids:
            assert name not in CHECKS
            CHECKS[name] = function
        return function

    return keep


def net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *(middle or (nn.Linear(8, 8),)), nn.Linear(8, 2))


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.01, **{"momentum": 0.9, **kwargs})


def init(model, optimizer=None, level="O1", **kwargs):
    kwargs = {"dtype": torch.float16, "exact_masters": False, "verbosity": 0, **kwargs}
    return amp.initialize(model, optimizer, opt_level=level, **kwargs)


def backward(model, optimizer, factor=1.0, x=None, **kwargs):
    loss = model(torch.ones(3, 4) if x is None else x).float().pow(2).mean() * factor
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
        scaled.backward()


def ready(level, **kwargs):
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, level, **kwargs)
    return model, optimizer


def dtypes(tensors):
    return [str(t.dtype).removeprefix("torch.") for t in tensors]


def dtype(tensor):
    return dtypes([tensor])[0]


def inside(model):
    """The dtypes of parameters and buffers, by name, while the model is called."""
    seen = {}

    def look(module, args):
        seen.update({k: dtype(v) for k, v in (*module.named_parameters(), *module.named_buffers())})

    handle = model.register_forward_pre_hook(look)
    with contextlib.suppress(NotImplementedError, RuntimeError):
        model(torch.ones(3, 4))
    handle.remove()
    return seen


def level_of(name):
    return name[-2:]


def state():
    return {key: dict(value) for key, value in amp.state_dict().items()}


# Levels, models and optimizers that are refused


@fact("opt_level_01", "opt_level_O4", "opt_level_lower", "opt_level_int")
def _(name):
    ready({"opt_level_01": "01", "opt_level_O4": "O4", "opt_level_lower": "o1", "opt_level_int": 1}[name])


@fact(*(f"half_model_{level}" for level in LEVELS))
def _(name):
    model = net().half()
    init(model, sgd(model), level_of(name))


@fact("half_buffer_O1")
def _(name):
    model = net()
    model.register_buffer("b", torch.zeros(1, dtype=torch.float16))
    init(model, sgd(model))


@fact("double_model_O1")
def _(name):
    model = net().double()
    init(model, sgd(model))


@fact("double_model_O2_init", "bfloat16_model_O2")
def _(name):
    model = net().double() if name.startswith("double") else net().bfloat16()
    init(model, sgd(model), "O2")
    return sorted(set(inside(model).values()))


@fact("double_optimizer_param_O2")
def _(name):
    model, foreign = net(), torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), foreign], lr=0.1)
    init(model, optimizer, "O2")
    backward(model, optimizer)


@fact("data_parallel_O1", "data_parallel_O2")
def _(name):
    model = net()
    init(nn.DataParallel(model), sgd(model), level_of(name))


@fact("data_parallel_after")
def _(name):
    model, _ = ready("O1")
    return dtype(nn.DataParallel(model)(torch.ones(3, 4)))


@fact("optimizer_wrong_type", "optimizer_tuple")
def _(name):
    model = net()
    init(model, "sgd" if name == "optimizer_wrong_type" else (sgd(model),))


@fact("model_wrong_type", "model_tuple")
def _(name):
    model = net()
    init((lambda x: x) if name == "model_wrong_type" else (model,), sgd(model))


@fact("same_optimizer_twice")
def _(name):
    model, optimizer = ready("O1")
    init(model, optimizer)


# Overrides


@fact("loss_scale_foo", "loss_scale_str", "loss_scale_int", "loss_scale_str_dynamic_O3")
def _(name):
    value = {"loss_scale_foo": "foo", "loss_scale_str": "128.0", "loss_scale_int": 128}.get(name, "dynamic")
    ready("O3" if name.endswith("O3") else "O1", loss_scale=value)
    if name == "loss_scale_int":
        own = state()["loss_scaler0"]
        return [own, type(own["loss_scale"]).__name__]
    return state()


@fact("keep_bn_maybe", "keep_bn_str_true", "keep_bn_str_false", "keep_bn_int1", "keep_bn_true_O1", "keep_bn_false_O1")
def _(name):
    value, level = {
        "keep_bn_maybe": ("maybe", "O2"), "keep_bn_str_true": ("True", "O3"), "keep_bn_str_false": ("False", "O2"),
        "keep_bn_int1": (1, "O2"), "keep_bn_true_O1": (True, "O1"), "keep_bn_false_O1": (False, "O1"),
    }[name]  # fmt: skip
    model = net(nn.BatchNorm1d(8))
    init(model, sgd(model), level, keep_batchnorm_fp32=value)
    return [inside(model)[name] for name, _ in model.named_parameters()]


@fact("keep_bn_true_O0")
def _(name):
    model = net(nn.BatchNorm1d(8))
    init(model, sgd(model), "O0", keep_batchnorm_fp32=True)
    return sorted(set(dtypes(model.parameters())))


@fact("master_weights_true_O1", "master_weights_false_O1", "master_weights_true_O3", "master_weights_false_O2")
def _(name):
    model, optimizer = ready(level_of(name), master_weights="true" in name)
    backward(model, optimizer)
    return dtypes(amp.master_params(optimizer))


@fact("cast_model_half_O1", "cast_model_float_O1", "patch_false_O1", "patch_true_O2", "patch_true_O0")
def _(name):
    known = {
        "cast_model_half_O1": {"cast_model_type": torch.float16},
        "cast_model_float_O1": {"cast_model_type": torch.float32},
        "patch_false_O1": {"patch_torch_functions": False},
    }
    kwargs = known.get(name, {"patch_torch_functions": True})
    model, _ = ready(level_of(name), **kwargs)
    return dtype(model(torch.ones(3, 4)))


@fact("cast_outputs_half_O1", "cast_outputs_float_O1", "cast_outputs_half_O2")
def _(name):
    model, _ = ready(level_of(name), cast_model_outputs=torch.float16 if "half" in name else torch.float32)
    return dtype(model(torch.ones(3, 4)))


@fact("num_losses_3", "max_below_init", "min_above_init")
def _(name):
    ready("O1", **{"num_losses_3": {"num_losses": 3}, "max_below_init": {"max_loss_scale": 1024},
                   "min_above_init": {"min_loss_scale": 2**20}}[name])  # fmt: skip
    return state()


@fact("min_above_init_overflow")
def _(name):
    model, optimizer = ready("O1", min_loss_scale=2**20)
    backward(model, optimizer, float("inf"))
    return state()


# What comes back


@fact("optimizer_none")
def _(name):
    return type(init(net(), level="O2")).__name__


@fact("optimizer_list", "model_list")
def _(name):
    model = net()
    optimizer = sgd(model)
    pair = init(model, [optimizer]) if name == "optimizer_list" else init([model], optimizer)
    return [type(part).__name__ for part in pair]


@fact("same_objects")
def _(name):
    result = {}
    for level in LEVELS:
        model = net()
        optimizer = sgd(model)
        pair = init(model, optimizer, level)
        result[level] = [pair[0] is model, pair[1] is optimizer]
    return result


# Calls at the wrong time


@fact("loss_id_out_of_range")
def _(name):
    model, optimizer = ready("O1")
    backward(model, optimizer, loss_id=1)


@fact("scale_loss_before_init")
def _(name):
    model = net()
    backward(model, sgd(model))


@fact("state_dict_before_init")
def _(name):
    amp.state_dict()


@fact("enabled_false")
def _(name):
    model = net()
    optimizer = sgd(model)
    pair = init(model, optimizer, enabled=False)
    loss = model(torch.ones(3, 4)).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        same = scaled is loss
    own = dtypes(model.state_dict().values())
    return [pair[0] is model, pair[1] is optimizer, same, sorted(set(own))]


@fact("enabled_false_state_dict")
def _(name):
    model = net()
    init(model, sgd(model), enabled=False)
    amp.state_dict()


# The optimizer's methods


def _step_kinds(level, factor):
    model, optimizer = ready(level, loss_scale="dynamic")
    backward(model, optimizer, factor)
    return model, optimizer


@fact(*(f"closure_{kind}_step_{level}" for kind in ("normal", "skipped") for level in LEVELS))
def _(name):
    _, optimizer = _step_kinds(level_of(name), float("inf") if "skipped" in name else 1.0)
    optimizer.step(lambda: torch.tensor(0.0))
    return "ok"


@fact(*(f"zero_grad_set_to_none_{level}" for level in LEVELS))
def _(name):
    model, optimizer = ready(level_of(name))
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params(optimizer)))
    return "ok"


@fact(*(f"zero_grad_effect_{level}" for level in LEVELS))
def _(name):
    model, optimizer = ready(level_of(name))
    backward(model, optimizer)
    optimizer.zero_grad()

    def kinds(params):
        return sorted({"none" if p.grad is None else "zeros" if not p.grad.any() else "other" for p in params})

    return [kinds(model.parameters()), kinds(amp.master_params(optimizer))]


@fact(*(f"step_return_{level}" for level in LEVELS))
def _(name):
    return _step_kinds(level_of(name), float("inf"))[1].step()


@fact(*(f"lazy_{level}" for level in LEVELS))
def _(name):
    _, optimizer = ready(level_of(name))
    before = dtypes(amp.master_params(optimizer))
    optimizer.zero_grad()
    return [before, dtypes(amp.master_params(optimizer))]


@fact(*(f"after_{kind}_grads_{level}" for kind in ("skip", "step") for level in LEVELS))
def _(name):
    model, optimizer = _step_kinds(level_of(name), float("inf") if "skip" in name else 1.0)
    optimizer.step()
    return [[p.grad is None for p in params] for params in (model.parameters(), amp.master_params(optimizer))]


@fact(*(f"model_grads_scaled_{level}" for level in LEVELS))
def _(name):
    model, optimizer = _step_kinds(level_of(name), 1.0)
    own, master = next(model.parameters()), next(amp.master_params(optimizer))
    return round(float(own.grad.double().norm() / master.grad.double().norm()), 6)


@fact(*(f"io_dtypes_{level}" for level in LEVELS))
def _(name):
    model, _ = ready(level_of(name))
    return [dtype(model(torch.ones(3, 4, dtype=d))) for d in (torch.float32, torch.float16, torch.float64)]


@fact(*(f"step_before_backward_scale_{level}" for level in LEVELS))
def _(name):
    model, optimizer = ready(level_of(name))
    loss = (model(torch.ones(3, 4)).float().mean() * 0 + 1).half()
    with amp.scale_loss(loss, optimizer) as scaled:
        result = [dtype(scaled), float(scaled.detach()) / float(loss.detach())]
        scaled.backward()
    return result


@fact(*(f"momentum_dtype_{level}" for level in LEVELS), *(f"preexisting_state_{level}" for level in LEVELS))
def _(name):
    model = net()
    optimizer = sgd(model)
    if name.startswith("preexisting"):
        model(torch.ones(3, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    init(model, optimizer, level_of(name))
    backward(model, optimizer)
    optimizer.step()
    return [dtype(optimizer.state[p]["momentum_buffer"]) for p in amp.master_params(optimizer)]


@fact(*(f"adam_dtype_{level}" for level in LEVELS))
def _(name):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    init(model, optimizer, level_of(name))
    backward(model, optimizer)
    optimizer.step()
    return [{k: dtype(v) for k, v in optimizer.state[p].items()} for p in amp.master_params(optimizer)]


# O2's models


@fact("master_start_values_O2")
def _(name):
    model = net()
    initial = [p.detach().clone() for p in model.parameters()]
    optimizer = sgd(model)
    init(model, optimizer, "O2")
    masters = list(amp.master_params(optimizer))
    rounded = all(torch.equal(m, w.half().float()) for m, w in zip(masters, initial, strict=True))
    return [rounded, all(torch.equal(m, w) for m, w in zip(masters, initial, strict=True))]


@fact("frozen_O2")
def _(name):
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    init(model, optimizer, "O2")
    optimizer.zero_grad()
    return dtypes(amp.master_params(optimizer))


@fact("state_dict_hook_O2")
def _(name):
    model, optimizer = ready("O2")
    for _ in range(3):
        backward(model, optimizer)
        optimizer.step()
    saved = list(model.state_dict().values())
    masters = list(amp.master_params(optimizer))
    is_half = all(torch.equal(s, p.float()) for s, p in zip(saved, model.parameters(), strict=True))
    is_master = all(torch.equal(s, m) for s, m in zip(saved, masters, strict=True))
    return [dtypes(saved), list(inside(model).values()), is_half, is_master]


@fact("submodule_state_dict_O2")
def _(name):
    return dtypes(ready("O2")[0][0].state_dict().values())


@fact("bn_conversion_O2", "bn_affine_false_O2")
def _(name):
    model = net(nn.BatchNorm1d(8, affine="false" not in name))
    init(model, sgd(model), "O2")
    parts = [{k: inside(model)[k] for k, _ in part} for part in (model.named_parameters(), model.named_buffers())]
    return parts[1] if "false" in name else parts


@fact("norms_O2")
def _(name):
    model = nn.ModuleDict({
        "ln": nn.LayerNorm(4), "gn": nn.GroupNorm(2, 4), "in": nn.InstanceNorm2d(4, affine=True,
        track_running_stats=True), "sbn": nn.SyncBatchNorm(4),
    })  # fmt: skip
    init(model, sgd(model), "O2")
    return inside(model)


class Echo(nn.Module):
    """Returns what its function makes of its arguments."""

    def __init__(self, function):
        super().__init__()
        self.lin, self.function = nn.Linear(2, 2), function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@fact("int_input_O2")
def _(name):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    init(model, sgd(model), "O2")
    return dtype(model(torch.tensor([1, 2])))


@fact("nested_io_O2")
def _(name):
    def forward(value, *, extra):
        first, (second,) = value["a"], value["b"]
        assert dtypes([first, second, extra]) == ["float16"] * 3
        return {"x": first, "y": [second, extra], "z": ("a", torch.tensor(1))}

    model = Echo(forward)
    init(model, sgd(model), "O2")
    out = model({"a": torch.ones(2), "b": (torch.ones(2),)}, extra=torch.ones(2))
    return [type(out).__name__, dtype(out["x"]), dtypes(out["y"]), [out["z"][0], dtype(out["z"][1])]]


@fact("none_input_O2")
def _(name):
    model = Echo(lambda x, nothing, number: [x, nothing is None and number == 0.5])
    init(model, sgd(model), "O2")
    out = model(torch.ones(2), None, 0.5)
    return [dtype(out[0]), out[1]]


@fact("submodule_call_O2")
def _(name):
    return dtype(ready("O2")[0][0](torch.ones(3, 4)))


@fact("add_param_group_O2")
def _(name):
    model, optimizer = ready("O2")
    backward(model, optimizer)
    optimizer.step()
    new = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer.add_param_group({"params": [new]})
    before = dtype(optimizer.param_groups[1]["params"][0])
    optimizer.zero_grad()
    return [before, dtype(optimizer.param_groups[1]["params"][0])]


# The scalers' state


def trained(level, factors=(1.0, 1.0), **kwargs):
    model, optimizer = ready(level, **kwargs)
    for factor in factors:
        backward(model, optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()
    return state()


@fact("state_dict_O0", "state_dict_O3")
def _(name):
    return trained(level_of(name))


@fact("state_dict_O1")
def _(name):
    value, raw = trained("O1"), amp.state_dict()
    first = raw["loss_scaler0"]
    return [value, type(raw).__name__, {k: type(v).__name__ for k, v in raw.items()},
            {k: type(v).__name__ for k, v in first.items()}]  # fmt: skip


@fact("state_dict_O2_overflow")
def _(name):
    return trained("O2", (1.0, 1.0, float("inf"), 1.0))


@fact("state_dict_static")
def _(name):
    return trained("O2", loss_scale=128.0)


@fact("state_dict_destination")
def _(name):
    ready("O1")
    target = OrderedDict()
    return [amp.state_dict(destination=target) is target, dict(target)]


@fact("load_state_dict", "load_state_dict_above_max", "load_state_dict_unexpected_key", "load_state_dict_too_many",
      "load_state_dict_missing_field")  # fmt: skip
def _(name):
    one = {"loss_scale": 1024.0, "unskipped": 7}
    value = {
        "load_state_dict_above_max": {"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 0}},
        "load_state_dict_unexpected_key": {"loss_scaler0": one, "foo": 1},
        "load_state_dict_too_many": {"loss_scaler0": one, "loss_scaler1": one},
        "load_state_dict_missing_field": {"loss_scaler0": {"loss_scale": 1024.0}},
    }.get(name, {"loss_scaler0": one})
    ready("O1", **({"max_loss_scale": 2.0**17} if name == "load_state_dict_above_max" else {}))
    amp.load_state_dict(value)
    return state()


# O1's functions


@fact("banned_bce_half", "banned_bce_float")
def _(name):
    ready("O1")
    kind = torch.float16 if "half" in name else torch.float32
    return dtype(F.binary_cross_entropy(torch.full((3,), 0.5, dtype=kind), torch.ones(3, dtype=kind)))


@fact("inplace_exp_half")
def _(name):
    ready("O1")
    torch.ones(2, dtype=torch.float16).exp_()


@fact("promote_double_float", "promote_half_bfloat16")
def _(name):
    ready("O1")
    first, second = (torch.float64, torch.float32) if "double" in name else (torch.float16, torch.bfloat16)
    return dtype(torch.add(torch.ones(2, dtype=first), torch.ones(2, dtype=second)))


@fact("linear_double")
def _(name):
    ready("O1")
    return dtype(F.linear(torch.ones(2, 3).double(), torch.ones(4, 3).double()))


@fact("iadd_half_float")
def _(name):
    ready("O1")
    original = x = torch.ones(2, dtype=torch.float16)
    x += torch.ones(2)
    return [dtype(x), bool((original == 2).all())]


@fact("disable_casts")
def _(name):
    ready("O1")
    with amp.disable_casts():
        inside = dtype(F.linear(torch.ones(2, 3), torch.ones(4, 3)))
    return [inside, dtype(F.linear(torch.ones(2, 3), torch.ones(4, 3)))]


@fact("half_function")
def _(name):
    seen = []
    half = amp.half_function(lambda x: seen.append(dtype(x)))
    single = amp.float_function(lambda x: seen.append(dtype(x)))
    widest = amp.promote_function(lambda x, y: seen.append([dtype(x), dtype(y)]))
    ready("O1")
    half(torch.ones(2))
    single(torch.ones(2, dtype=torch.float16))
    widest(torch.ones(2, dtype=torch.float16), torch.ones(2))
    return seen


class Namespace:
    """Stands for a user's module."""

    __name__ = "namespace"


@fact("register_half")
def _(name):
    space = Namespace()
    space.f = original = dtype
    amp.register_half_function(space, "f")
    ready("O1")
    received = space.f(torch.ones(2))
    amp.shutdown()
    assert space.f is original
    return received


@fact("register_unknown")
def _(name):
    amp.register_half_function(torch, "no_such_function")


@fact("O1_cache_identity")
def cached(name, **kwargs):
    seen = []

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            out = F.linear(x, self.weight)
            seen.append(out.grad_fn)
            return out

    # Autocast casts below Python, so the cast is seen in the graph: both calls share one cast of the weight.
    layer = Layer()
    optimizer = sgd(layer)
    init(layer, optimizer, **kwargs)
    loss = (layer(torch.ones(1, 2)) + layer(torch.ones(1, 2))).sum()
    casts = [node.next_functions[1][0].next_functions[0][0] for node in seen]
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    layer(torch.ones(1, 2))
    casts.append(seen[-1].next_functions[1][0].next_functions[0][0])
    return ["float16" if "ToCopy" in casts[0].name() else casts[0].name(), casts[0] is casts[1], casts[0] is casts[2]]


@fact("O1_optimizer_step_uncast")
def _(name):
    seen = []

    class Custom(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(dtype(F.linear(torch.ones(1, 2), torch.ones(3, 2))))

    model = net()
    optimizer = Custom(model.parameters(), lr=0.1)
    init(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    return seen[0]


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


@pytest.mark.parametrize("name", [n for n, fact in FACTS.items() if not fact.get("version_artifact")])
def test_a_fact_of_apex_holds(name):
    fact, different = FACTS[name], DIFFERENT.get(name)
    expected, raises = fact.get("value"), fact["raises"]
    if different is not None:
        value, _ = different
        raises = value.__name__ if isinstance(value, type) else None
        expected = None if raises else value
    if raises:
        with pytest.raises(getattr(builtins, raises)) as caught:
            CHECKS[name](name)
        words = str(caught.value)
        assert "lightning_turbo" in str(caught.traceback[-1].path)
        assert len(words) > 40 or isinstance(caught.value, KeyError), words
    else:
        assert CHECKS[name](name) == expected


def test_every_fact_is_checked():
    assert set(CHECKS) == {name for name, fact in FACTS.items() if not fact.get("version_artifact")}
    assert set(DIFFERENT) <= set(CHECKS)


def test_casts_are_kept_as_in_apex_on_request():
    # With an old torch never: it would take the gradient from a weight used under no_grad.
    assert cached("", cast_cache=True) == ["float16", cache_survives_no_grad(), False]


def test_two_training_forwards_before_one_backward():
    # In apex this failed on today's torch ("O1_two_forwards", an artefact of its weight cache).
    model, optimizer = ready("O1", loss_scale=128.0)
    loss = (model(torch.ones(3, 4)) + model(torch.ones(3, 4))).float().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
