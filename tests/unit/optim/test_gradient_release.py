"""Released gradients change no number, and are gone right after the step."""

import pytest
import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from lightning_turbo.optim import GradientRelease, release_after_steps


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def test_a_gradient_that_the_loop_lets_go_of_is_gone_at_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientRelease(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    gradient = TensorWeakRef(model[0].weight.grad)
    optimizer.zero_grad()
    assert gradient() is None


def test_added_groups_are_released_shared_parameters_are_not_and_nothing_after_remove():
    model, late, shared = network(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in ([*model.parameters(), shared], [shared])]
    releases = release_after_steps(optimizers)
    optimizers[0].add_param_group({"params": [late]})

    def step():
        optimizers[0].zero_grad()
        (model(torch.ones(1, 4)).sum() + late.sum() + shared.sum()).backward()
        optimizers[0].step()
        return [p.grad is not None for p in (model[0].weight, late, shared)]

    assert [step(), step()] == [[True, True, True], [False, False, True]]
    releases[0].remove()
    assert step() == [True, True, True]
    with pytest.raises(TypeError, match=r"optimizer: expected a torch.optim.Optimizer, got \[\]"):
        GradientRelease([])
