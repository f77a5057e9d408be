"""Functions that a program adds to the cast lists of O1 by registering or decorating them."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, PrefetchLoader, amp
from tests.amp.loops import init, net
from tests.integration.regression import Regression
from tests.trainers import quiet_trainer

NARROW, WIDE, MATRIX = torch.ones(2, dtype=torch.float16), torch.ones(2), torch.ones(4, 2)


@pytest.mark.parametrize(("kind", "home", "name", "args", "dtype"), [
    ("float", torch, "sigmoid", [NARROW], torch.float32),
    ("half", torch, "sqrt", [WIDE], torch.float16),
    ("promote", torch, "hypot", [NARROW, WIDE], torch.float32),
    ("float", nn.functional, "linear", [WIDE, MATRIX], torch.float32),  # though autocast would cast it below
    ("half", torch, "exp", [WIDE], torch.float16),
])  # fmt: skip
def test_a_registered_function_of_torch_is_added_to_the_cast_list(kind, home, name, args, dtype):
    function = getattr(home, name)
    before = function(*args).dtype
    getattr(amp, f"register_{kind}_function")(home, name)
    assert function(*args).dtype is before
    init(net(), None, "O1")
    assert getattr(home, name) is function
    assert function(*args).dtype is dtype
    amp.shutdown()
    assert function(*args).dtype is before


def test_a_registered_function_of_another_module_is_wrapped_once_during_O1():
    class Space:
        @staticmethod
        def f(x):
            return x.dtype

        @staticmethod
        def pair(x, y):
            return x.dtype, y.dtype

    original = Space.f
    amp.register_promote_function(Space, "pair")
    amp.register_float_function(Space, "f")
    amp.register_half_function(Space, "f")  # the last registration counts
    for level, dtype in (("O1", torch.float16), ("O2", torch.float32), ("O1", torch.float16)):
        init(net(), None, level)
        assert Space.f(torch.ones(2)) is dtype
        assert Space.pair(NARROW, WIDE) == (torch.float32 if level == "O1" else torch.float16, torch.float32)
    amp.shutdown()
    assert Space.f is original
    with pytest.raises(
        ValueError, match=r"register_half_function: expected the name of a function in .*Space.*, got 'nothing'"
    ):
        amp.register_half_function(Space, "nothing")


class Kernels:
    @staticmethod
    def doubled(x):
        return 2 * x

    @classmethod
    def of_class(cls, x):
        return x + cls.__name__.count("K")

    def of_object(self, x):
        return 3 * x


class MoreKernels(Kernels):
    pass


@pytest.mark.parametrize("cls", [Kernels, MoreKernels])
@pytest.mark.parametrize(("name", "result"), [("doubled", 2.0), ("of_class", 2.0), ("of_object", 3.0)])
def test_registered_static_and_class_methods_keep_their_kind(cls, name, result):
    before = dict(vars(cls))
    amp.register_float_function(cls, name)
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    called = getattr(cls(), name)(torch.ones(1))
    amp.shutdown()
    assert called == result
    assert getattr(cls(), name)(torch.ones(1)) == result
    assert dict(vars(cls)) == before


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_cast_functions_of_apex_work_within_a_module(dtype):
    seen = []
    in_half, in_float = (decorate(lambda x: x.dtype) for decorate in (amp.half_function, amp.float_function))

    class Choosing(Regression):
        def training_step(self, batch, index):
            made = self.net(batch[0])
            with amp.disable_casts():
                seen.extend([(batch[0] @ self.net[0].weight.T).dtype, in_half(batch[0])])
            seen.extend([torch.mm(batch[0], self.net[0].weight.T).dtype, in_float(made)])
            seen.extend([torch.exp(batch[0]).dtype, in_half(batch[0])])
            return super().training_step(batch, index)

    functions = torch.mm, torch.exp
    amp.register_float_function(torch, "mm")
    amp.register_half_function(torch, "exp")
    try:
        trainer = quiet_trainer(max_steps=1, plugins=[ApexAMP("O1", dtype=dtype)])
        trainer.fit(Choosing(), PrefetchLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=8))
    finally:
        amp.registration._registered.clear()
    assert seen == [torch.float32] * 4 + [dtype] * 2
    assert in_half(torch.ones(1)) is torch.float32  # after the run
    assert (torch.mm, torch.exp) == functions
