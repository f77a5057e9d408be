"""The stages of an optimizer's gradients, and overflow checks of every kind of gradient."""

import pytest
import torch

from lightning_turbo import ApexGradScaler
from lightning_turbo.amp.gradients import GradientStage, GradientState, has_non_finite

FOUND, CLEAN = torch.tensor(1.0), torch.tensor(0.0)
OWNER = ApexGradScaler()
MOVES = {
    "scaled": lambda state: state.scaled(OWNER),
    "clean": lambda state: state.unscaled(CLEAN),
    "overflowed": lambda state: state.unscaled(FOUND),
    "clean pass": lambda state: state.add_unscaled_pass(CLEAN),
    "pass of others": lambda state: state.add_unscaled_pass(None),
    "still there": lambda state: state.look_again([torch.tensor([torch.inf])]),
    "gone": lambda state: state.look_again([torch.zeros(1)]),
    "none left": lambda state: state.look_again([]),
    "stepped": lambda state: state.stepped(),
    "updated": lambda state: state.updated(),
    "dropped": lambda state: state.dropped(),
}


@pytest.mark.parametrize(("moves", "stage", "overflow", "skipped"), [
    ("", "EMPTY", False, False),
    ("scaled, clean, stepped", "STEPPED", False, False),
    ("scaled, overflowed", "UNSCALED", True, False),
    ("scaled, overflowed, stepped", "STEPPED", True, True),
    ("overflowed, stepped, updated", "EMPTY", True, True),  # a scheduler may ask after update
    ("overflowed, stepped, updated, scaled", "SCALED", False, False),
    ("overflowed, updated", "EMPTY", False, False),  # no step was skipped
    ("overflowed, stepped, dropped", "EMPTY", False, False),
    ("overflowed, clean pass", "UNSCALED", True, False),
    ("overflowed, pass of others", "UNSCALED", True, False),
    ("overflowed, still there, clean pass", "UNSCALED", True, False),
    ("overflowed, gone, clean pass", "UNSCALED", False, False),
    ("overflowed, none left, pass of others", "UNSCALED", False, False),
    ("scaled, updated", "SCALED", False, False),
])  # fmt: skip
def test_stages_of_gradients(moves, stage, overflow, skipped):
    state = GradientState()
    for move in filter(None, moves.split(", ")):
        MOVES[move](state)
    assert state.stage is GradientStage[stage]
    assert state.owner is (OWNER if stage == "SCALED" else None)
    assert state.was_skipped() is skipped
    assert state.is_overflow() is overflow


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3.0])
@pytest.mark.parametrize("make", [
    lambda x: x, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.to_sparse,
    lambda x: torch.complex(torch.zeros_like(x), x),
], ids=["float32", "float16", "bfloat16", "float64", "sparse", "complex"])  # fmt: skip
def test_the_overflow_check_does_not_change_gradients(make, bad):
    grads = [make(torch.ones(3)), make(torch.tensor([1.0, bad]))]
    assert has_non_finite(grads) == (bad != 3.0)
    torch.testing.assert_close(grads, [make(torch.ones(3)), make(torch.tensor([1.0, bad]))], equal_nan=True)
