"""What a level casts in a run: modules, optimizer state, refused modules, and what is restored after the run."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_turbo import amp
from lightning_turbo.amp.casts import LevelCasts
from lightning_turbo.errors import AmpUsageError, TurboWarning
from tests.amp.loops import net as network
from tests.amp.loops import sgd
from tests.integration.regression import layers


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_module_is_kept_in_float32(level, by_name):
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x):
            seen.append((x.dtype, self.gain.dtype))
            return torch.fft.irfft(torch.fft.rfft(x) * self.gain)

    seen, keep = [], ["1"] if by_name else [Spectrum]
    net = nn.Sequential(nn.Linear(4, 4), Spectrum(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    settings = {"opt_level": level, "dtype": torch.bfloat16, "verbosity": 0}
    amp.initialize(net, optimizer, **settings)
    with pytest.raises(RuntimeError, match="BFloat16"):
        net(torch.ones(2, 4))
    amp.shutdown()
    amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.01), keep_fp32_modules=keep, **settings)
    for model in (net, copy.deepcopy(net)) if level == "O2" else (net,):  # at O3 a copy is half
        seen.clear()
        assert model(torch.ones(2, 4)).dtype is torch.float32
        assert seen == [(torch.float32, torch.float32)]
    amp.shutdown()
    for wrong in ("nothing", 3, nn.LSTM):
        with pytest.raises(AmpUsageError, match=r"keep_fp32_modules: expected a name in model.named_modules\(\)"):
            amp.initialize(net, keep_fp32_modules=[wrong], **settings)
    with pytest.raises(AmpUsageError, match="contradicts O1"):
        amp.initialize(net, opt_level="O1", keep_fp32_modules=keep)


def test_parameters_of_no_model_are_not_cast_and_warn():
    net, criterion = layers(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*net.parameters(), criterion], lr=0.1)
    with pytest.warns(TurboWarning, match="SGD holds 1 parameters that belong to no model, so O2 does not cast them"):
        amp.initialize(net, optimizer, opt_level="O2", verbosity=0)
    amp.shutdown()


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(("make", "said"), [
    (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), r"expected Python modules.*\(Linear\).*O0 or O1"),
    (lambda: nn.Sequential(nn.LazyLinear(2)), "expected modules with weights, got a LazyLinear"),
])  # fmt: skip
def test_a_module_that_cannot_be_cast_is_an_error(make, said, level):
    with pytest.raises(AmpUsageError, match=said):
        LevelCasts(level, device_type="cpu").convert([make()])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_casts_can_be_pickled_before_and_during_a_run_and_restore_everything(level):
    model, casts = network(), LevelCasts(level, device_type="cpu", dtype=torch.bfloat16)
    optimizer = sgd(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    casts.convert([model])
    casts.attach(optimizer, [model])
    half = torch.bfloat16 if level == "O3" else torch.float32
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {half}
    other = pickle.loads(pickle.dumps(casts))
    assert (other.properties, [*other.optimizers], other.half_calls) == (casts.properties, [], None)
    casts.restore()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
