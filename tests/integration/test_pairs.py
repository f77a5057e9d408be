"""Combinations of techniques at O0 to O3: every pair and all together train, keep exact results, and resume exactly."""

import functools
import itertools
import math

import lightning.pytorch as pl
import pytest
import torch

from tests.integration.recording import Save
from tests.registry import BY_NAME, TECHNIQUES, run
from tests.versions import unpickling

LEVELS = ("O0", "O1", "O2", "O3")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode"),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.NoEffectWarning"),
    pytest.mark.filterwarnings("ignore::lightning_turbo.errors.TurboWarning"),
    pytest.mark.usefixtures("capsys"),
]


@functools.cache
def losses(level, names, epochs=2):
    """Return the losses of all batches of some epochs, and the logged values of the last one."""
    trainer, model = run(pl, level, [BY_NAME[name] for name in names], epochs=epochs)
    return [*model.losses, float(trainer.callback_metrics["loss"])]


def check(names, levels, epochs=2):
    changing = tuple(name for name in names if not BY_NAME[name].same_bits)
    for level in levels:
        together = losses(level, names, epochs)
        assert len(together) == 5 * epochs + 1
        assert all(math.isfinite(loss) for loss in together)
        if len(names) < len(BY_NAME):
            assert epochs == 1 or together[-1] < together[0], level
            # Techniques that promise the same bits keep them in any combination.
            assert together == losses(level, changing, epochs), level


PAIRS = [*itertools.combinations(BY_NAME, 2)]


def take_one_place(names):
    """Return whether two techniques have the same place in a run, which the first one takes."""
    one, other = (BY_NAME[name] for name in names)
    places = [(each.scheduler, each.optimizer, each.strategy) for each in (one, other)]
    prefetches = all(name.startswith("prefetch") for name in names)
    return prefetches or any(a is not None and b is not None for a, b in zip(*places, strict=True))


def groups():
    """Yield groups of techniques in which each pair occurs, and pairs of those that have the same place in a run."""
    apart = {pair for pair in PAIRS if take_one_place(pair)}
    yield from sorted(apart)
    missing = {frozenset(pair) for pair in PAIRS if pair not in apart}
    while missing:
        group = sorted(min(map(sorted, missing)))
        for _ in range(4):
            others = [name for name in BY_NAME if name not in group]
            fitting = [name for name in others if not any({*pair} <= {*group, name} for pair in apart)]
            found = [sum(frozenset((name, each)) in missing for each in group) for name in fitting]
            if any(found):
                group.append(fitting[found.index(max(found))])
        missing -= set(map(frozenset, itertools.combinations(group, 2)))
        yield tuple(sorted(group, key=[*BY_NAME].index))


GROUPS = [*groups()]


def test_each_pair_is_in_a_group():
    assert {frozenset(pair) for group in GROUPS for pair in itertools.combinations(group, 2)} == {
        frozenset(pair) for pair in PAIRS
    }


@pytest.mark.parametrize("names", GROUPS, ids="+".join)
def test_groups_of_techniques_with_each_pair_run_together(names):
    """One epoch at one level. All techniques together run at every level, below; each pair by itself nightly."""
    check(names, [LEVELS[GROUPS.index(names) % len(LEVELS)]], epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_pairs_of_techniques_run_together_at_every_level(names):
    check(names, LEVELS)


def test_all_techniques_run_together():
    check(tuple(BY_NAME), LEVELS)


# The short form has every pair of level, place and omitted technique.
STOPS = [(5, "on_train_epoch_end"), (2, "on_train_batch_end")]
LEFT_OUT = ["effective_batch_size", "exact_accumulation"]
CASES = [
    pytest.param(
        left_out, *stop, level, marks=[pytest.mark.slow] * ((n + k + m) % 2), id=f"{left_out}-{stop[1]}-{level}"
    )
    for n, left_out in enumerate(LEFT_OUT)
    for k, stop in enumerate(STOPS)
    for m, level in enumerate(LEVELS)
]


@pytest.mark.parametrize(("left_out", "batches", "hook", "level"), CASES)
def test_a_resumed_run_with_all_techniques_but_one_equals_an_uninterrupted_one(
    left_out, batches, hook, level, tmp_path
):
    # EffectiveBatchSize sets the accumulation; without it, the Trainer's argument does. Both are tested.
    techniques = [t for t in TECHNIQUES if t.name not in (left_out, "doctor")]
    _, straight = run(pl, level, techniques, epochs=3, callbacks=[Save("first.ckpt", batches, hook)])
    _, resumed = run(pl, level, techniques, epochs=3, fit={"ckpt_path": "first.ckpt", **unpickling(True)})
    assert resumed.losses == straight.losses[batches:]
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
