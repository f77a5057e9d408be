"""The watch: each call counts once, at its line, and no result changes."""

import contextlib
import gc
import sys
import time
import types

import numpy as np
import pytest
import torch
import torchmetrics
from torch.nn import functional as F

from lightning_turbo.doctor.guard import Guard
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.watch import StepWatch


@pytest.fixture
def watch():
    watch = StepWatch(Sources([]), Guard(lambda: None))
    yield watch
    watch.pause()


def seen(watch, function, *args):
    """Run a function as one watched step, and return the recorded calls without their lines."""
    watch.resume()
    try:
        function(*args)
    finally:
        watch.end_step()
    return sorted((call.kind, call.name, call.count) for call in watch.calls())


FETCHES = [
    (lambda x: x.sum().item(), ".item()"),
    (lambda x: float(x[0]), "float(tensor)"),
    (lambda x: x.cpu(), ".cpu()"),
    (lambda x: 1 if x[0] > 0 else 2, "`if tensor`"),
    (lambda x: f"{x.mean()}", "a tensor in an f-string"),
    (lambda x: str(x), "print(tensor)"),
    (lambda x: np.asarray(x), "numpy.asarray(tensor)"),
    (lambda x: x[x > 0], "tensor[mask]"),
    (lambda x: x[(x > 0,)], "tensor[mask]"),
    (lambda x: torch.where(x > 0), "torch.where with one argument"),
    (lambda x: torch.nonzero(x), "torch.nonzero"),
    (lambda x: F.one_hot(x.long().abs()), "one_hot without num_classes"),
    (lambda x: torch.allclose(x, x), "torch.allclose"),
    (lambda x: [0, 1, 2][x.argmax()], "a tensor as an index of a list"),
    (lambda x: torch.equal(x, x), "torch.equal"),
    (lambda x: torch.unique(x), "torch.unique"),
    (lambda x: x.numpy(), ".numpy()"),
    (lambda x: x.tolist(), ".tolist()"),
    (lambda x: int(x.max()), "int(tensor)"),
    (lambda x: torch.isfinite(x[0]) and 1, "`if tensor`"),
    (lambda x: x.repeat_interleave(x.long()), "repeat_interleave without output_size"),
    (lambda x: x.masked_select(x > 0), "torch.masked_select"),
    (lambda x: x.__setitem__(x > -1, x * 2), "tensor[mask] = values"),
]  # fmt: skip


def test_a_call_that_fetches_a_value_counts_once():
    for function, expected in FETCHES:
        function(torch.rand(3))  # torch imports what it needs to print at the first call, and reads files for that
        watch, started = StepWatch(Sources([]), Guard(lambda: None)), time.perf_counter()
        assert seen(watch, function, torch.rand(3)) == [("sync", expected, 1)], expected
        assert 0 < watch.calls()[0].seconds < time.perf_counter() - started


UPLOADS = [
    (lambda x: torch.tensor([1.0, 2.0], device=x.device), "torch.tensor(..., device=...)"),
    (lambda x: torch.tensor(0.5, device=x.device), "torch.tensor(..., device=...)"),
    (lambda x: torch.tensor(np.ones(3), device=x.device), "torch.tensor(..., device=...)"),
    (lambda x: torch.as_tensor([1.0, 2.0], device=x.device), "torch.as_tensor(..., device=...)"),
    (lambda x: torch.as_tensor(np.ones(3), device=x.device), "torch.as_tensor(..., device=...)"),
    (lambda x: torch.asarray([1.0, 2.0], device=x.device), "torch.asarray(..., device=...)"),
    (lambda x: torch.tensor(data=[1.0], device=x.device), "torch.tensor(..., device=...)"),
    (lambda x: torch.as_tensor(data=0.5, device=x.device), "torch.as_tensor(..., device=...)"),
    (lambda x: torch.asarray(obj=[1.0], device=x.device), "torch.asarray(..., device=...)"),
    (lambda x: x.new_tensor([1.0, 2.0]), ".new_tensor(...)"),
    (lambda x: x[[0, 2]], "a list as an index"),
    (lambda x: x[None, [0, 2]], "a list as an index"),
    (lambda x: x[np.array([0, 2])], "a list as an index"),
    (lambda x: x.__setitem__([0, 2], 0.0), "a list as an index"),
]  # fmt: skip


def test_a_copy_from_the_host_counts_once():
    for function, expected in UPLOADS:
        assert seen(StepWatch(Sources([]), Guard(lambda: None)), function, torch.rand(3)) == [("moved", expected, 1)], (
            expected
        )


@pytest.mark.parametrize(("function", "copied"), [
    (lambda x: torch.tensor(np.ones(3)), True),
    (lambda x: torch.tensor(data=np.ones(3)), True),
    (lambda x: torch.tensor(np.float32(1.0)), False),
    (lambda x: torch.as_tensor(np.ones(3)), False),
    (lambda x: torch.from_numpy(np.ones(3)), False),
    (lambda x: torch.tensor([1.0, 2.0]), False),
])  # fmt: skip
def test_a_copied_array_is_recorded(watch, function, copied):
    assert seen(watch, function, torch.rand(3)) == [("copied", "torch.tensor(array)", 1)] * copied


HARMLESS = [
    lambda x: torch.tensor([1.0], device="cpu"),
    lambda x: torch.as_tensor(x, device=x.device),
    lambda x: torch.as_tensor(data=x, device=x.device),
    lambda x: (torch.tensor(data=[1.0]), torch.asarray(obj=[1.0])),
    lambda x: (x[0], x[(0,)], x[1:2], x[None], x[..., 0], x[()]),
    lambda x: torch.full((2,), 0.5, device=x.device),
    lambda x: x[0],
    lambda x: x[x.long()],
    lambda x: x.masked_fill(x > 0, 1.0),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.__setitem__(x > 0, 0.0),
    lambda x: x.new_zeros(3),
    lambda x: torch.zeros(3, device=x.device).to(x.device),
    lambda x: torch.as_tensor(x),
    lambda x: torch.tensor([1.0, 2.0]),
    lambda x: x.to(torch.float64),
    lambda x: (x.shape, x.device, x.dtype, x.is_cuda, len(x)),
    lambda x: F.one_hot(x.long().abs(), 9),
    lambda x: x.repeat_interleave(x.long(), output_size=0),
    lambda x: torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0),
]  # fmt: skip


def test_a_call_that_fetches_no_value_is_not_recorded():
    for number, function in enumerate(HARMLESS):
        assert seen(StepWatch(Sources([]), Guard(lambda: None)), function, torch.rand(3)) == [], number


def tidy():
    gc.collect(0)
    torch.cuda.synchronize()


def test_calls_within_torch_are_not_recorded(watch, monkeypatch):
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: None)
    monkeypatch.setattr("torch._C._cuda_synchronize", lambda: None, raising=False)
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    code = tidy.__code__.replace(co_filename=torch.__file__)
    within_torch = types.FunctionType(code, {"gc": gc, "torch": torch, "__name__": "torch._dynamo.utils"})
    assert seen(watch, within_torch) == []
    expected = [("housekeeping", "gc.collect()", 1), ("housekeeping", "torch.cuda.synchronize()", 1)]
    assert seen(watch, tidy) == expected


class Loss(torchmetrics.MeanMetric):
    """A metric of the user."""


@pytest.mark.parametrize(("function", "within"), [
    (lambda x: torchmetrics.MeanMetric()(x), "torchmetrics"),
    (lambda x: Loss()(x), "torchmetrics"),
    (lambda x: torch.distributions.Categorical(logits=x, validate_args=True), "torch.distributions"),
    (lambda x: torch.distributions.Normal(x, 1.0, validate_args=True).log_prob(x), "torch.distributions"),
    (lambda x: torch.nn.Sequential(torch.nn.Identity())(x).sum().item(), ""),
    (lambda x: F.one_hot(x.long().abs()), ""),
])  # fmt: skip
def test_a_library_that_fetches_a_value_is_named_at_the_users_line(watch, function, within):
    seen(watch, function, torch.rand(3))
    calls = [call for call in watch.calls() if call.kind == "sync"]
    assert {(call.site.file, call.site.line, call.within) for call in calls} == {
        (__file__, function.__code__.co_firstlineno, within)
    }


def test_calls_are_counted_by_line_and_step(watch):
    def thrice(x):
        for _ in range(3):
            x.sum().item()

    seen(watch, thrice, torch.rand(3))
    seen(watch, thrice, torch.rand(3))
    seen(watch, lambda x: None, torch.rand(3))
    (call,) = watch.calls()
    assert (call.count, call.steps, watch.watched) == (6, 2, 3)
    assert call.site.file == __file__


def test_fetches_of_optimizers_and_scalers_are_not_recorded(watch):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], foreach=False)
    scaler = torch.amp.GradScaler("cpu")

    def step(x):
        scaler.scale((weight * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert seen(watch, step, torch.rand(3)) == []


def test_a_watch_that_cannot_start_leaves_nothing_behind(watch, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(watch._mode), "__enter__", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            watch.resume()
    watch.pause()
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)
    assert seen(watch, lambda x: x.sum().item(), torch.rand(3)) == [("sync", ".item()", 1)], "it can start again"


def test_starting_a_watch_twice_records_calls_once(watch):
    x = torch.rand(3)
    watch.resume()
    assert seen(watch, lambda: x.sum().item()) == [("sync", ".item()", 1)]
    assert (torch._C._len_torch_function_stack(), sys.getprofile()) == (0, None)


@pytest.mark.parametrize("layered", [False, True])
def test_a_norm_cancels_the_bias_of_the_layer_before_it_if_there_is_one(watch, layered):
    layer = torch.nn.Conv2d(1, 2, 1)
    norm = torch.nn.BatchNorm2d(2)
    seen(watch, lambda: norm(layer(torch.ones(2, 1, 2, 2)) if layered else torch.ones(2, 2, 2, 2)))
    assert watch.biases == ({id(layer.bias)} if layered else set())
