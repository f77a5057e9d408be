"""The factors of an accumulation window, and their products with gradients."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_turbo import ExactAccumulation
from lightning_turbo.optim import AccumulationWindow, scale_gradients


def test_a_factor_of_one_changes_no_bit():
    window = AccumulationWindow()
    for _ in range(4):
        window.add(torch.ones((), requires_grad=True))
    assert window.factor(4) == AccumulationWindow().factor(4) == 1.0
    for weight, touched in ((37, False), (36, True)):
        loss = torch.ones((), requires_grad=True) * 1
        AccumulationWindow(reference_weight=37.0).add(loss, weight)
        assert bool(loss._backward_hooks) is touched
    for zero in (0, torch.tensor(0.0)):
        window = AccumulationWindow()
        window.add(torch.ones((), requires_grad=True), zero)
        assert float(window.factor(2)) == 0.0


class Asked(TorchDispatchMode):
    """Records the operations that run, with the dtypes of their tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        self.operations.append((str(function), [t.dtype for t in tensors if isinstance(t, torch.Tensor)]))
        return function(*args, **(kwargs or {}))


def of_many_dtypes(device="cpu"):
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.float32)
    shapes = (3, 5, (2, 2), 4, 7, ())
    made = [nn.Parameter(torch.zeros(shape, dtype=d, device=device)) for d, shape in zip(dtypes, shapes, strict=True)]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64).to(parameter)
    return made


@pytest.mark.parametrize("factor", [1 / 3, torch.tensor(1 / 3, dtype=torch.float64)], ids=["number", "tensor"])
def test_each_product_of_gradient_and_factor_is_rounded_once(factor):
    parameters = of_many_dtypes()
    before = [p.grad.clone() for p in parameters]
    scale_gradients(parameters, factor)
    for gradient, p in zip(before, parameters, strict=True):
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        expected = (gradient.to(wide) * torch.tensor(1 / 3, dtype=wide)).to(gradient.dtype)
        torch.testing.assert_close(p.grad, expected, rtol=0 if gradient.ndim else 2e-7, atol=0)


def test_gradients_of_one_dtype_are_multiplied_in_one_call_without_a_copy_from_the_host():
    meta = torch.device("meta")
    strategy = SimpleNamespace(root_device=meta, reduce=lambda total, reduce_op: total)
    trainer = SimpleNamespace(strategy=strategy, world_size=2, accumulate_grad_batches=4)
    callback = ExactAccumulation(weight=len)
    callback._window.add(torch.zeros((), requires_grad=True), 6.0)
    optimizer = torch.optim.SGD(of_many_dtypes(meta), 0.1)
    with Asked() as asked:
        callback.on_before_optimizer_step(trainer, None, optimizer)
    # The factor is filled on the device, because a copy from the host would synchronize CUDA.
    assert asked.operations[0][0] == "aten.full.default"
    calls = [dtypes for name, dtypes in asked.operations if "_foreach_mul_" in name]
    assert sorted(calls, key=len) == [[torch.float64] * 2, [torch.float32] * 4]  # the gradients and the factor


def test_the_gradient_of_a_weighted_loss_keeps_its_dtype():
    weight = nn.Parameter(torch.ones((), dtype=torch.float16))
    window = AccumulationWindow(reference_weight=4096.0)
    loss = weight * 2
    window.add(loss, torch.tensor(5000))
    (loss * 1024).backward()
    assert weight.grad.dtype is torch.float16
    assert weight.grad.item() == pytest.approx(2 * 1024 * 5000 / 4096, rel=1e-3)  # half precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [3.0, torch.tensor(3.0, dtype=torch.float64)], ids=["number", "tensor"])
def test_sparse_gradients_are_multiplied(dtype, factor):
    table = nn.Embedding(4, 2, sparse=True, dtype=dtype)
    table(torch.tensor([1, 1])).sum().backward()
    scale_gradients(table.parameters(), factor)
    assert table.weight.grad.to_dense()[1].tolist() == [6.0, 6.0]


@pytest.mark.parametrize(("function", "arguments", "message"), [
    ("add", (torch.ones(()), math.nan), "weight: expected a finite number .* got nan"),
    ("add", (torch.ones(()), torch.ones(3)), r"shape of weight: expected one number per batch, .* got \(3,\)"),
    ("add", (torch.ones(()), "3"), "weight: expected a number or a tensor with one element, got '3'"),
    ("add", (0.5,), r"loss: expected the tensor .* got 0\.5"),
    ("factor", (4, math.inf), "total: expected .* got inf"),
    ("factor", (0,), "divisor: expected an integer of 1 or more, got 0"),
    ("__init__", (0.0,), "reference_weight: expected a finite number above 0, .* got 0.0"),
])  # fmt: skip
def test_impossible_values_are_refused(function, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(AccumulationWindow(), function)(*arguments)
    with pytest.raises(ValueError, match=r"factor: expected a finite number or a tensor, .* got nan"):
        scale_gradients([], math.nan)


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_parameters_without_gradients_are_skipped(factor):
    with_gradient, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    scale_gradients([without], factor)
    with_gradient.grad = torch.ones(2)
    scale_gradients([without, with_gradient], factor)
    assert without.grad is None
    assert with_gradient.grad.tolist() == [0.5, 0.5]
