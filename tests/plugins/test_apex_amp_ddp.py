"""Two gloo ranks give the same weights on both ranks, and the same as float32 or as one process on the joint batch."""

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("ddp_worker.py")
JOINT = [
    f"joint-ddp-{level}-{half}-default-{window}"
    for level, half in (
        ("O0", "bfloat16"), ("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16"),
        ("O3", "bfloat16"),
    )
    for window in (1, 2)
]  # fmt: skip
LEVELS = ("O1-bfloat16-64", "O1-float16-64", "O2-bfloat16-1", "O2-float16-64")
DYNAMIC = ("O1-float16-dynamic", "O2-float16-dynamic", "O2-bfloat16-dynamic")
BY_HAND = {
    **{f"{kind}-{strategy}": (LEVELS, 1) for kind in ("two", "sync") for strategy in ("ddp", "turbo")},
    "unused-ddp_find_unused_parameters_true": (LEVELS, 3),
    **{f"spike-{strategy}": (DYNAMIC, 1) for strategy in ("ddp", "turbo")},
}


def load(folder, case, ranks=2):
    """What the ranks ended with; the weights of all of them are the same."""
    results = [torch.load(folder / f"{case}.{ranks}.{rank}", weights_only=True) for rank in range(ranks)]
    for name, weight in results[0]["weights"].items():
        assert weight.dtype is torch.float32
        assert torch.equal(weight, results[-1]["weights"][name]), (case, name)
    assert results[0]["scale"] == results[-1]["scale"], case
    assert results[0]["dtypes"] == results[-1]["dtypes"], case
    return results[0]


def apart(ours, right):
    """How far two runs end from each other, against how far the second one went."""
    weights, goal, start = (
        torch.cat([value.ravel() for value in values.values()])
        for values in (ours["weights"], right["weights"], right["start"])
    )
    return float((weights - goal).norm() / (goal - start).norm())


def test_two_ranks_equal_each_other_and_the_joint_batch(tmp_path):
    for ranks in (1, 2):
        run_ranks(WORKER, tmp_path, ",".join(JOINT), ranks=ranks)
    for case in JOINT:
        ours, joint = load(tmp_path, case), load(tmp_path, case, ranks=1)
        assert ours["dtypes"] == joint["dtypes"], case
        # Float32 sums in another order at O0, half gradients that are rounded for half a batch each elsewhere.
        limit = 1e-5 if "O0" in case else 6e-2 if "bfloat16" in case else 3e-3
        assert apart(ours, joint) < limit, (case, apart(ours, joint))


def test_backward_passes_by_hand_and_parts_without_use_are_as_in_float32(tmp_path):
    """An overflow of one rank in a pass by itself, too, is one on all."""
    plain = {name: f"{name}-none-float32-1-{window}" for name, (_, window) in BY_HAND.items()}
    cases = {f"{name}-{level}-{window}": name for name, (levels, window) in BY_HAND.items() for level in levels}
    run_ranks(WORKER, tmp_path, ",".join([*plain.values(), *cases]))
    for case, name in cases.items():
        ours, right = load(tmp_path, case), load(tmp_path, plain[name])
        assert apart(ours, right) < 0.06, (case, apart(ours, right))
        if name.startswith("unused"):
            assert torch.equal(ours["weights"]["never.weight"], right["start"]["never.weight"]), case
            assert not torch.equal(ours["weights"]["rare.weight"], right["start"]["rare.weight"]), case
