"""Two ranks: techniques agree, stopped runs resume, windows and strategies are exact.

What runs to its end shares one start of the ranks, which costs more than the runs.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integration.ranks_worker import FORTY, LEVELS, STRATEGIES, Mean, Net, uneven, whole
from tests.integration.resuming import ALL, assert_same, check_resumed
from tests.ranks import run_ranks
from tests.registry import BY_NAME
from tests.versions import KNOWS_WEIGHTS_ONLY

WORKER = Path(__file__).with_name("ranks_worker.py")
distributed = pytest.mark.distributed


def load(folder, name):
    """What each rank saved under a name."""
    return [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    jobs = ("techniques", "resume", "stopped", "accumulation", "places")
    run_ranks(WORKER, folder, *jobs, "strategies", "own_orders", "lean")
    return folder


def check_techniques(folder, names):
    ranks = load(folder, names)
    assert all(math.isfinite(loss) for rank in ranks for loss in rank["losses"]), names
    for key, value in ranks[0]["module"].items():
        if "running" not in key:  # each rank sees its own batches
            assert torch.equal(value, ranks[1]["module"][key]), (names, key)


@distributed
@pytest.mark.parametrize("level", LEVELS)
def test_all_techniques_together_keep_the_ranks_equal(level, ended):
    check_techniques(ended, f"{'+'.join(BY_NAME)}.{level}")


@pytest.mark.slow
@distributed
@pytest.mark.timeout(1000)
def test_every_two_techniques_keep_the_ranks_equal(tmp_path):
    run_ranks(WORKER, tmp_path, "pairs", timeout=900)
    names = {path.name[:-2] for path in tmp_path.iterdir()}
    assert len(names) == len(LEVELS) * len(BY_NAME) * (len(BY_NAME) - 1) // 2
    for name in names:
        check_techniques(tmp_path, name)


@distributed
@pytest.mark.parametrize("case", ["O1-adamw_fused-float16", "O2-sgd-float16"])
def test_a_resumed_run_equals_one_that_never_stopped(case, ended):
    ranks = load(ended, f"resume.{case}")
    for ends in ranks:
        check_resumed(case, ends)
    assert_same(ranks[0]["straight"]["updated"], ranks[1]["straight"]["updated"])


@pytest.mark.slow
@distributed
@pytest.mark.timeout(1000)
def test_a_resumed_run_equals_one_that_never_stopped_at_every_level_with_every_optimizer(tmp_path):
    run_ranks(WORKER, tmp_path, "resume_all", timeout=900)
    for case in ALL:
        for ends in load(tmp_path, f"resume.{case}"):
            check_resumed(case, ends)


# Runs that are stopped


@distributed
def test_a_run_that_was_told_to_stop_ends_as_if_it_had_not_been(ended):
    for straight, again in zip(load(ended, "stopped.straight"), load(ended, "stopped.again"), strict=True):
        assert straight["steps"] == again["steps"] == 6
        assert len(straight["seen"]) == 20
        assert again["seen"] == straight["seen"][8:]
        assert_same(straight["module"], again["module"])


@distributed
def test_nobody_waits_for_others_while_an_error_is_under_way(ended):
    zero, one = load(ended, "places")
    assert (zero["ordinary"], one["ordinary"]) == ([0, 1], [1, 1])  # only rank 0 writes
    assert zero["all"] == one["all"] == [0, 1]
    assert (zero["error"], one["error"]) == ([0], None)  # only rank 0 asks, which would hang
    assert zero["told"] == [0, 1]
    assert len(zero["said"]) == 1
    assert "the number of rank 0 only, because a KeyError is under way" in zero["said"][0]


@pytest.mark.slow
@distributed
def test_a_rank_that_an_error_left_alone_writes_its_checkpoint(tmp_path):
    run_ranks(WORKER, tmp_path, "alone")
    alone = torch.load(tmp_path / "alone")
    assert any("the error of rank 0" in error for error in alone["errors"])
    assert any("random states and loaders' states of rank 0 only" in text for text in alone["said"])
    run_ranks(WORKER, tmp_path, "after_alone")
    zero, one = load(tmp_path, "after_alone")
    assert zero["steps"] == one["steps"] == 6
    assert (bool(zero["said"]), bool(one["said"])) == (True, False)


# ExactAccumulation


@distributed
@pytest.mark.parametrize("weighted", [False, True])
def test_two_ranks_equal_one_joint_batch(weighted, ended):
    model = Mean()
    optimizer = model.configure_optimizers()
    collate = uneven if weighted else whole
    batches = [
        [collate([FORTY[i] for i in range(rank + 2 * start, rank + 2 * start + 8, 2)])[0] for start in range(0, 20, 4)]
        for rank in (0, 1)  # as DistributedSampler deals them
    ]
    for start in (0, 3, 0, 3):
        optimizer.zero_grad()
        window = torch.cat([x for own in batches for x in own[start : start + 3]])
        model.training_step([window], 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for rank in load(ended, f"accumulation.{weighted}"):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(rank["module"][name], value, rtol=1e-6, atol=1e-6)


# Strategies


@distributed
def test_turbo_ddp_equals_ddp(ended):
    runs = {name: load(ended, f"strategies.{name}") for name in STRATEGIES}
    for name, (zero, one) in runs.items():
        assert_same(zero["module"], one["module"])
        seen = [zero["seen"][k : k + 6] + one["seen"][k : k + 6] for k in (0, 6)]
        epochs = [sorted(itertools.chain.from_iterable(batches)) for batches in seen]
        assert epochs == [list(range(48))] * 2, name  # each sample once an epoch over the ranks
        assert seen[0] != seen[1], name
        assert zero["loaded_ahead"] == one["loaded_ahead"] == (name == "prefetched"), name
    for turbo, stock, tolerance in (
        ("turbo", "stock", 0.0), ("static-1", "stock-1", 0.0), ("turbo-O2", "stock-O2", 0.0),
        ("sized", "stock", 0.0), ("prefetched", "stock", 0.0), ("compiled", "stock", 1e-6),
    ):  # fmt: skip
        ours, theirs = runs[turbo][0], runs[stock][0]
        assert ours["steps"] == theirs["steps"]
        for name, value in ours["module"].items():
            torch.testing.assert_close(value, theirs["module"][name], rtol=0, atol=tolerance, msg=turbo)
    for name, static, view, holds in (  # they are released before the next step, not after the last one
        ("stock", False, False, True), ("turbo", False, True, True), ("static-1", True, False, True),
    ):  # fmt: skip
        made = {"static_graph": static, "gradient_as_bucket_view": view, "holds_gradients": holds}
        assert runs[name][0]["ddp"] == made, name


@distributed
def test_turbo_ddp_goes_on_from_checkpoints(ended):
    for step in (8, 12):  # in and at the end of an epoch
        straight, again = load(ended, "own_orders.None"), load(ended, f"own_orders.{step}")
        assert [len(rank["seen"]) for rank in straight] == [24, 24]
        assert [rank["seen"] for rank in again] == [rank["seen"][step:] for rank in straight]
        assert_same([rank["module"] for rank in again], [rank["module"] for rank in straight])


@distributed
@pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="the lean parts are for Lightning 2.6")
def test_the_lean_parts_compute_the_same_and_stop_after_the_same_batch(ended):
    for stock, lean, killed in zip(*(load(ended, f"lean.{name}") for name in ("stock", "lean", "killed")), strict=True):
        assert_same(stock["module"], lean["module"])
        assert stock["metrics"] == lean["metrics"]
        # Rank 1 was told to end in batch 2, at whose end it tells the other, which knows at the end of the next.
        assert (killed["batches"], killed["metrics"]) == (3, None)
        # Of 24 batches, Lightning's broadcast fetches a value in each; what is logged at the end is left.
        assert lean["fetched"] < 24 <= stock["fetched"] - lean["fetched"]


@pytest.mark.slow
@distributed
def test_two_spawned_ranks_give_what_ddp_spawn_gives(tmp_path):
    run_ranks(WORKER, tmp_path, "spawned", ranks=1)
    stock, turbo = (torch.load(tmp_path / f"spawned.{name}.0", weights_only=True) for name in ("stock", "turbo"))
    assert_same(stock, turbo)
    assert stock["metrics"]["steps"] == 6
    assert not torch.equal(stock["module"]["net.0.weight"], Net().net[0].weight)
