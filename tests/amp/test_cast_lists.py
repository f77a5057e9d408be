"""The cast table of O1: the dtype of each function and module, compared with apex."""

import builtins
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_turbo.amp.autocast import FunctionCasts

FOLDER = Path(__file__).parents[1] / "recorded" / "apex"
OPS = json.loads((FOLDER / "o1_cast_table.json").read_text())["ops"]
MODULES = json.loads((FOLDER / "o1_modules.json").read_text())["modules"]
HOMES = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": torch.Tensor}
DTYPES = {"half": torch.float16, "float": torch.float32, "double": torch.float64}

# This library computes these calls. apex raised an error, because its casts did not promote dtypes as torch does.
PROMOTES_WHERE_APEX_RAISED = "apex's promotion knew no float64; torch's promotion gives float64"
WRITES_IN_PLACE = "x += y must change x, as everywhere in torch; apex replaced x by a float32 sum"
JOINS_DTYPES = "apex handed the mix of dtypes to the function, which raised; autocast brings them together"
HALF_RAISED = "the CPU has no half kernel, autocast computes in float32"
DOUBLE_TO_FLOAT = "apex left float64 to the function, which raised; here the loss is on the float32 list"

# (namespace, operation, pattern) -> (result of this library, why it differs from apex)
DIFFERENT = {
    **{
        ("torch.Tensor", f"__i{op}__", "half_then_float"): ("float16", WRITES_IN_PLACE)
        for op in ("add", "sub", "mul", "div", "truediv")
    },
    **{
        ("torch.Tensor", op, "double_then_float"): ("float64", "the in-place form takes the dtype of what it writes to")
        for op in ("addmm_", "addmv_", "addbmm_", "baddbmm_")
    },
    **{
        ("torch.nn.functional", "gaussian_nll_loss", pattern): ("float32", DOUBLE_TO_FLOAT)
        for pattern in ("double", "double_then_float")
    },
    **{
        (home, op, pattern): ("float16", JOINS_DTYPES)
        for home, op in (("torch.nn.functional", "scaled_dot_product_attention"), ("torch", "einsum"))
        for pattern in ("half_then_float", "float_then_half")
    },
    **{
        ("torch", "cdist", pattern): ("float32", HALF_RAISED)
        for pattern in ("half", "half_then_float", "float_then_half")
    },
}


def expected_difference(row, pattern, record):
    """Return the result of this library if it differs from apex, with the reason; otherwise ``None``."""
    key = (row["namespace"], row["op"], pattern)
    if key in DIFFERENT:
        return DIFFERENT[key]
    raised = record.get("error") == "NotImplementedError" and record["error_from"] == "amp"
    if raised and pattern == "double_then_float" and row["list"] == "PROMOTE":
        compares = row["op"].strip("_") in ("eq", "equal", "ge", "gt", "le", "lt", "ne")
        return "bool" if compares else "float64", PROMOTES_WHERE_APEX_RAISED
    return None


def dtype_at(pattern, index):
    first, _, others = pattern.partition("_then_")
    return DTYPES[first if index == 0 or not others else others]


def built(spec, pattern, op, made):
    """Return an argument as described in the table. Float tensors are uniform in [0.2, 0.8]."""
    if isinstance(spec, list):
        return [built(item, pattern, op, made) for item in spec]
    match = re.fullmatch(r"(float|int64|bool)\((.*)\)", spec)
    if match is None:
        return spec.strip("'") if spec.startswith("'") else eval(spec)
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    if match[1] == "bool":
        return torch.ones(shape, dtype=torch.bool)
    if match[1] == "int64":
        return torch.full(shape, 1 if op == "ctc_loss" else 0)
    values = -1 - 2 * torch.rand(shape) if op == "ctc_loss" else torch.rand(shape) * 0.6 + 0.2
    made.append(None)
    return values.to(dtype_at(pattern, len(made) - 1))


def dtypes_of(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [dtypes_of(item) for item in value]
    return type(value).__name__


@pytest.fixture(scope="module")
def casts():
    return FunctionCasts("cpu", torch.float16, "apex")


def check_call(row, pattern, record, casts):
    made = []
    args = [built(spec, pattern, row["op"], made) for spec in row["args"]]
    if row["op"] == "ctc_loss":
        args[2:4] = torch.full((2,), 6), torch.full((2,), 2)
    function = getattr(HOMES[row["namespace"]], row["op"])
    different = expected_difference(row, pattern, record)

    def call():
        with casts.forward_context():
            return function(*args)

    if different is not None:
        ours, _ = different
        assert ours != record.get("out"), "no longer a difference: remove it from the list"
        assert dtypes_of(call()) == ours
    elif record.get("error"):
        with pytest.raises(getattr(builtins, record["error"]) if record["error_from"] == "amp" else Exception):
            call()
    else:
        result = call()
        assert dtypes_of(result) == record["out"]
        if record.get("result_is_self") is not None:
            assert (result is args[0]) == record["result_is_self"]


@pytest.mark.filterwarnings("ignore")  # the table deliberately calls deprecated functions and losses that broadcast
@pytest.mark.parametrize("row", OPS, ids=lambda row: f"{row['namespace']}.{row['op']}")
def test_a_function_returns_the_same_dtype_as_in_apex(row, casts):
    if not hasattr(HOMES[row["namespace"]], row["op"]):
        pytest.skip("this torch has no such function")
    wrong = {}
    for pattern, record in row["calls"].items():
        if not record.get("version_artifact"):
            try:
                check_call(row, pattern, record, casts)
            except (AssertionError, RuntimeError, pytest.fail.Exception) as error:
                wrong[pattern] = error
    assert not wrong


def test_the_list_of_differences_contains_only_calls_of_the_table():
    known = {(row["namespace"], row["op"], pattern) for row in OPS for pattern in row["calls"]}
    assert set(DIFFERENT) <= known


def dims_of(name):
    """Return an input with a shape that the module accepts."""
    shapes = {
        "Conv1d": (2, 3, 8), "Conv2d": (2, 3, 8, 8), "Conv3d": (2, 2, 6, 6, 6), "ConvTranspose1d": (2, 3, 8),
        "ConvTranspose2d": (2, 3, 8, 8), "ConvTranspose3d": (2, 2, 6, 6, 6), "BatchNorm1d": (4, 3),
        "BatchNorm2d": (2, 3, 4, 4), "BatchNorm3d": (2, 3, 4, 4, 4), "GroupNorm": (2, 4, 4),
        "InstanceNorm2d": (2, 3, 4, 4), "LocalResponseNorm": (2, 3, 4, 4), "MaxPool2d": (2, 3, 4, 4),
        "AvgPool2d": (2, 3, 4, 4), "AdaptiveAvgPool2d": (2, 3, 4, 4), "Upsample": (2, 3, 4, 4),
        "MultiheadAttention": (3, 2, 8), "TransformerEncoderLayer": (3, 2, 8), "LSTM": (3, 2, 5), "GRU": (3, 2, 5),
        "RNN": (3, 2, 5),
    }  # fmt: skip
    return shapes.get(name, (4, 5))


def call_module(text, dtype):
    """Create the module of a row, call it under O1, and return output, input and module."""
    name, arguments = re.fullmatch(r"(\w+)\((.*)\)", text.removesuffix(".eval()")).groups()
    arguments = re.sub(r"(?<![='\w])(relu|batchmean)", r"'\1'", arguments)
    if name == "RNN" or name == "RNNCell":
        arguments = arguments.replace("'relu'", "nonlinearity='relu'")
    arguments = arguments.replace("'batchmean'", "reduction='batchmean'")
    module = eval(f"nn.{name}({arguments})", {"nn": nn})
    if text.endswith(".eval()"):
        module.eval()
    x = (torch.rand(dims_of(name)) * 0.6 + 0.2).to(dtype)
    if name == "Embedding":
        return module(torch.tensor([1, 2])), None, module
    x.requires_grad_()
    more = []
    if name == "Bilinear":
        more = [torch.rand(4, 6).to(dtype)]
    elif name in ("CrossEntropyLoss", "NLLLoss"):
        more = [torch.tensor([0, 1, 2, 3])]
    elif name.endswith(("Loss", "Similarity", "Distance")):
        more = [torch.rand(4, 5).to(dtype)]
    elif name == "MultiheadAttention":
        more = [x, x]
    return module(x, *more), x, module


# Module -> (result of this library, why it differs from apex)
DIFFERENT_MODULES = {
    "PReLU()": ("float16", "nn.PReLU calls torch.prelu, on apex's half list; its alias in nn.functional escaped apex"),
}

MODULE_CALLS = [
    pytest.param(row["module"], pattern, record, id=f"{row['module']}-{pattern}")
    for row in MODULES
    for pattern, record in row["calls"].items()
    if not record.get("version_artifact")
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize(("module", "pattern", "record"), MODULE_CALLS)
def test_a_module_returns_the_same_dtype_as_in_apex(module, pattern, record, casts):
    if record["error"]:
        with casts.forward_context(), pytest.raises(NotImplementedError):
            call_module(module, DTYPES[pattern])
        return
    ours, _ = DIFFERENT_MODULES.get(module, (record["out"], ""))
    if module == "RMSNorm(5)":  # on no list: torch's own dtype, which has changed since torch 2.6
        ours = dtypes_of(call_module(module, DTYPES[pattern])[0])
    with casts.forward_context():
        out, x, built_module = call_module(module, DTYPES[pattern])
        assert dtypes_of(out) == ours
    sum(leaf.float().sum() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)).backward()
    if x is not None:
        assert dtypes_of(x.grad) == record["input_grad"]
    assert sorted({dtypes_of(p.grad) for p in built_module.parameters() if p.grad is not None}) == record["param_grads"]
