"""Two gloo ranks give the same weights on both ranks, and the same as one process on the joint batch."""

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

WORKER = Path(__file__).with_name("ddp_worker.py")
CASES = [
    f"{level}-{half}-{window}"
    for level, half in (
        ("O0", "bfloat16"), ("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16"),
        ("O3", "bfloat16"),
    )
    for window in (1, 2)
] + ["O2-float16-1-compressed", "O2-float16-2-compressed"]  # fmt: skip
# Here the sum over a window travels in half precision, and overflows at a smaller loss scale: one more step is skipped.
SKIPS_MORE = {"O2-float16-2-compressed": 2e-2}


@pytest.mark.distributed
def test_two_ranks_equal_each_other_and_the_joint_batch(tmp_path):
    for ranks in (1, 2):
        run_ranks(WORKER, tmp_path, ",".join(CASES), ranks=ranks)
    for case in CASES:
        joint = torch.load(tmp_path / f"{case}.1.0", weights_only=True)
        ranks = [torch.load(tmp_path / f"{case}.2.{rank}", weights_only=True) for rank in (0, 1)]
        assert ranks[0]["dtypes"] == ranks[1]["dtypes"] == joint["dtypes"], case
        for a, b in zip(ranks[0]["updated"], ranks[1]["updated"], strict=True):
            assert torch.equal(a, b), case
        # How far the two runs end from each other, against how far they went: float32 sums in another order at
        # O0, half gradients that are rounded for half a batch each elsewhere.
        names = [name for name, value in joint["module"].items() if value.is_floating_point()]
        assert all(ranks[0]["module"][name].dtype is torch.float32 for name in names)
        apart = torch.cat([(ranks[0]["module"][n] - joint["module"][n]).ravel() for n in names]).norm()
        travelled = torch.cat([(joint["module"][n] - joint["start"][n]).ravel() for n in names]).norm()
        limit = {"O0": 1e-5, "float16": 3e-3, "bfloat16": 6e-2}["O0" if case.startswith("O0") else case.split("-")[1]]
        assert apart / travelled < SKIPS_MORE.get(case, limit), (case, float(apart / travelled))


LEVELS = ("O1-bfloat16-64", "O1-float16-64", "O2-bfloat16-1", "O2-float16-64")
UNUSED = "ddp_find_unused_parameters_true"


@pytest.mark.distributed
def test_backward_passes_by_hand_and_parts_without_use_are_as_in_float32(tmp_path):
    kinds = [("two", "ddp"), ("two", "turbo"), ("sync", "ddp"), ("sync", "turbo"), ("unused", UNUSED)]
    cases = {f"{kind}-{strategy}": [f"{kind}-{strategy}-{level}" for level in LEVELS] for kind, strategy in kinds}
    plain = {name: f"{name}-none-float32-1" for name in cases}
    worker = Path(__file__).with_name("manual_ddp_worker.py")
    run_ranks(worker, tmp_path, ",".join([*plain.values(), *(case for those in cases.values() for case in those)]))
    for name, those in cases.items():
        right = torch.load(tmp_path / f"{plain[name]}.0", weights_only=True)
        for case in those:
            ranks = [torch.load(tmp_path / f"{case}.{rank}", weights_only=True)["weights"] for rank in (0, 1)]
            assert all(torch.equal(ranks[0][key], ranks[1][key]) for key in ranks[0]), case
            apart = torch.cat([(ranks[0][key] - value).ravel() for key, value in right["weights"].items()]).norm()
            moved = torch.cat([(value - right["start"][key]).ravel() for key, value in right["weights"].items()]).norm()
            assert apart / moved < 0.06, (case, float(apart / moved))
            if name.startswith("unused"):
                assert torch.equal(ranks[0]["never.weight"], right["start"]["never.weight"]), case
                assert not torch.equal(ranks[0]["rare.weight"], right["start"]["rare.weight"]), case


@pytest.mark.distributed
def test_an_overflow_of_one_rank_in_a_pass_by_itself_is_one_on_all(tmp_path):
    plain, levels = "spike-ddp-none-float32-1", ("O1-float16-dynamic", "O2-float16-dynamic", "O2-bfloat16-dynamic")
    cases = [f"spike-{strategy}-{level}" for strategy in ("ddp", "turbo") for level in levels]
    run_ranks(Path(__file__).with_name("manual_ddp_worker.py"), tmp_path, ",".join([plain, *cases]))
    right = torch.load(tmp_path / f"{plain}.0", weights_only=True)
    moved = torch.cat([(value - right["start"][key]).ravel() for key, value in right["weights"].items()]).norm()
    for case in cases:
        ranks = [torch.load(tmp_path / f"{case}.{rank}", weights_only=True) for rank in (0, 1)]
        assert ranks[0]["scale"] == ranks[1]["scale"], case
        assert all(torch.equal(ranks[0]["weights"][key], ranks[1]["weights"][key]) for key in right["weights"]), case
        apart = torch.cat([(ranks[0]["weights"][key] - v).ravel() for key, v in right["weights"].items()]).norm()
        assert apart / moved < 0.06, (case, float(apart / moved))
