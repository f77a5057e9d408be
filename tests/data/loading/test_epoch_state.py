"""Saving and loading a state, the samples that it counts as used, and refusing states of other versions."""

import dataclasses

import pytest
import torch

from lightning_turbo.data.loading.epoch_state import EpochState, GeneratorStates, OrderStart, StreamPlace, used_states
from lightning_turbo.data.orders.sharding import SampleOrder, Shards
from tests.data.samples import saved

STATES = GeneratorStates({"torch": torch.arange(3), "random": (3, (1, 2), None)}, [torch.arange(2), "text"])
ORDER = SampleOrder("RandomSampler", 29, True, epoch=2, generator=torch.arange(5), has_own_generator=True)
EVERY = {
    "fresh": EpochState(),
    "indices": EpochState(
        consumed=3, length=8, order=OrderStart(STATES, STATES, [2, 2]), generators=[torch.arange(2)],
        rng_before_latest=STATES.shared, held=["text"], shards=Shards(ORDER, 2, 4, 8, 1, is_resharded=True),
    ),
    "begun": EpochState(order=OrderStart(STATES), first_rng=STATES.shared),
    "stream": EpochState(
        consumed=2, ended=True, over=True,
        stream=StreamPlace("Lines", 4, 2, places=[(1, [({"a": 1}, {})] * 2)], num_workers=2),
    ),
}  # fmt: skip


def same(one, other):
    """Whether two states are equal; tensors have no truth value."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("state", EVERY.values(), ids=EVERY)
def test_a_state_goes_through_a_file(state):
    again = EpochState.from_dict(saved(state.to_dict()))
    assert type(again) is EpochState
    assert same(again.to_dict(), state.to_dict())
    for name in ("order", "shards", "stream"):
        assert type(getattr(again, name)) is type(getattr(state, name))


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EpochState().consumed = 1


@pytest.mark.parametrize("version", [{}, {"version": 2}, {"version": 4}])
def test_states_of_other_versions_are_refused(version):
    earlier = {"consumed": 2, "order": None, "whole": False, **version}
    with pytest.raises(ValueError, match=r"a loader's state of version 3, got one of another snapshot.*'whole'.*Go on"):
        EpochState.from_dict(earlier)


@pytest.mark.parametrize(("state", "used"), [
    (EpochState(consumed=3, shards=Shards(ORDER, 2, 4)), 24),
    (EpochState(consumed=4, shards=Shards(ORDER, 2, 4)), 29),  # the last batch is not full
    (EpochState(consumed=2, ended=True, shards=Shards(ORDER, 2, 4)), 29),
    (EpochState(consumed=5, shards=Shards(ORDER, 1, 3, from_sample=8, from_batch=2, is_resharded=True)), 17),
    (EpochState(consumed=5, stream=StreamPlace("Lines", 4, 2)), 20),
    (EpochState(consumed=5, stream=StreamPlace("Lines", 4, 1, from_sample=7, from_batch=3, is_resharded=True)), 15),
])  # fmt: skip
def test_used_samples(state, used):
    assert state.used_samples == used
    assert state.is_within_epoch


def test_counted_from():
    anew = Shards(ORDER, 1, 3, from_sample=8, from_batch=2, is_resharded=True)
    counted = EpochState(consumed=2, shards=anew).counted_from(5, ended=False)
    assert (counted.consumed, counted.ended, counted.batches_before, counted.used_samples) == (5, False, 5, 8)
    ended = EpochState(consumed=2, shards=anew).counted_from(9, ended=True)
    assert (ended.consumed, ended.ended, ended.used_samples) == (9, True, 29)
    place = StreamPlace("Lines", 4, 1, from_sample=7, from_batch=1, is_resharded=True, places=[(1, "one"), (2, "two")])
    stream = EpochState(consumed=2, stream=place).counted_from(4, ended=False)
    assert (stream.consumed, stream.batches_before) == (4, 4)
    assert stream.stream.places == [(3, "one"), (4, "two")]


RNG = {"torch": torch.arange(3)}


@pytest.mark.parametrize(("consumed", "ended", "used", "over", "left"), [
    (5, False, None, False, (5, False)), (5, False, 4, False, (4, False)), (5, False, 3, False, (3, False)),
    (1, False, 0, False, (0, False)), (8, True, None, True, (8, True)), (8, True, None, False, (8, False)),
    (5, False, None, True, (5, True)), (0, False, None, True, (0, False)),
])  # fmt: skip
def test_what_a_trainer_used(consumed, ended, used, over, left):
    state = EpochState(
        consumed=consumed, ended=ended, over=ended, end_follows=True, first_rng=RNG, rng_before_latest=RNG,
        held=["held"], stream=StreamPlace("Lines", 1, 1),
    )  # fmt: skip
    foreign = [{"place": 3}, None]
    once = used_states([state.to_dict(), *foreign], over=over, used=used)
    again = used_states(once, over=over)
    for states in (once, again):
        assert states[1:] == foreign
        read = EpochState.from_dict(states[0])
        assert (read.consumed, read.over) == left
        assert (read.end_follows, read.first_rng) == (False, None)
        unused = consumed - left[0]
        assert (read.rng_before_next is not None) == (unused == 1)
        assert read.held == ([] if unused > 1 else ["held"])


def test_a_loader_that_ended_before_gave_none_of_the_batches_that_were_not_used():
    short, long = EpochState(consumed=3, ended=True, over=True), EpochState(consumed=5)
    states = used_states([short.to_dict(), long.to_dict()], over=False, used=4)
    assert [EpochState.from_dict(each).consumed for each in states] == [3, 4]


@pytest.mark.parametrize(("kind", "batching"), [
    ("fresh", (0, 0, 0, 0)), ("begun", (0, 0, 0, 0)), ("indices", (2, 4, 8, 1)), ("stream", (2, 4, 0, 0)),
])  # fmt: skip
def test_how_the_rest_is_batched_does_not_change_with_the_used_batches(kind, batching):
    assert EVERY[kind].batching == dataclasses.replace(EVERY[kind], consumed=7).batching == batching
