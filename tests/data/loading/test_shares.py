"""A loader goes on at the sample where others of another number of ranks, or of another batch size, were stopped."""

import functools
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_turbo.data import PackedDataset, PatchDataset, PrefetchLoader, SeededSampler, pack
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Lazy, saved, seeded, take, values

LENGTH = 29


def seeded_sampler(ranks, rank, **settings):
    return SeededSampler(range(LENGTH), 4, num_replicas=ranks, rank=rank, **settings)


def lightnings(ranks, rank):
    """The samplers of a loader that is shuffled, as Lightning gives them to one rank and to several."""
    return RandomSampler(range(LENGTH)) if ranks == 1 else DistributedSampler(range(LENGTH), ranks, rank)


def own_generator(ranks, rank):
    return RandomSampler(range(LENGTH), generator=seeded(2))


def in_order(ranks, rank):
    return SequentialSampler(range(LENGTH)) if ranks == 1 else DistributedSampler(range(LENGTH), ranks, rank, False)


def unshuffled_at_first(ranks, rank):
    """Lightning shuffles on several ranks, whatever the loader says: the order that began goes on."""
    return SequentialSampler(range(LENGTH)) if ranks == 1 else DistributedSampler(range(LENGTH), ranks, rank)


SAMPLERS = [seeded_sampler, lightnings, in_order]
LIVES = [((2, 4), (1, 8), (3, 2)), ((1, 3), (2, 5), (1, 1)), ((1, 5), (1, 2), (1, 7)), ((3, 1), (2, 1), (2, 6))]


def loaders(make, ranks, batch_size, **settings):
    torch.manual_seed(0)
    made = [PrefetchLoader(range(LENGTH), batch_size, sampler=make(ranks, rank), **settings) for rank in range(ranks)]
    for loader in made:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(1)
    return made


def run(made, state, batches=None):
    """The interleaved samples of all ranks, and the state of the first rank after ``batches`` batches of each."""
    for loader in made:
        if state is not None:
            loader.load_state_dict(state)
    torch.manual_seed(1)
    iterators = [iter(loader) for loader in made]
    parts = [take(each, batches) if batches is not None else values(each) for each in iterators]
    steps = itertools.zip_longest(*([index for batch in part for index in batch] for part in parts))
    return [index for step in steps for index in step if index is not None], saved(made[0].state_dict())


@pytest.mark.parametrize(("make", "lives"), [
    *itertools.product(SAMPLERS, LIVES), (own_generator, LIVES[2]),
    (unshuffled_at_first, ((1, 4), (2, 3), (2, 2))), (unshuffled_at_first, ((1, 4), (2, 3), (1, 2))),
])  # fmt: skip
def test_lives_of_other_ranks_and_batches_make_one_epoch(make, lives):
    whole, _ = run(loaders(make, *lives[0]), None)
    seen, state = [], None
    for ranks, batch_size in lives[:2]:
        more, state = run(loaders(make, ranks, batch_size), state, 1)
        seen += more
    ranks, batch_size = lives[2]
    last = loaders(make, ranks, batch_size)
    more, state = run(last, state)
    assert state["over"]
    assert state["consumed"] == len(last[0])
    # Samples that pad the last step of the ranks were seen before.
    assert (seen + more)[:LENGTH] == whole[:LENGTH]
    assert len(seen + more) - LENGTH == -(LENGTH - len(seen)) % ranks


@pytest.mark.parametrize("kind", ["packed", "patches"])
def test_packed_data_and_patches_are_the_same_with_other_ranks(kind, tmp_path):
    volumes = torch.arange(4.0 * 6**3).reshape(4, 6, 6, 6).numpy()
    pack([{"image": each} for each in volumes], tmp_path / "packed")
    made = {
        "packed": lambda: PackedDataset(
            tmp_path / "packed", sample_transform=lambda each: each["image"] + torch.rand(1)
        ),
        "patches": lambda: PatchDataset(tmp_path / "packed", (2, 3, 2), per_scan=6),
    }[kind]()

    def rows(ranks, batch_size, state=None, batches=None):
        parts = []
        for rank in range(ranks):
            sampler = SeededSampler(made, 4, num_replicas=ranks, rank=rank)
            loader = PrefetchLoader(made, batch_size, sampler=sampler, sample_seeds=1)
            if state is not None:
                loader.load_state_dict(state)
            taken = itertools.islice(iter(loader), batches)
            parts.append([row for batch in taken for row in (batch["image"] if kind == "patches" else batch)])
        return [row for step in zip(*parts, strict=True) for row in step], saved(loader.state_dict())

    whole, _ = rows(1, 1)
    first, state = rows(2, 1, batches=1)
    rest, _ = rows(1, 3, state)
    assert len(whole) == len(made)
    assert torch.equal(torch.stack(first + rest), torch.stack(whole))


@pytest.mark.parametrize(
    ("first", "second", "left"), [((2, 4), (1, 6), 18), ((1, 6), (2, 4), 16), ((1, 10), (2, 10), 0)]
)
def test_the_last_samples_are_left_out_as_in_an_epoch_from_its_beginning(first, second, left):
    make = functools.partial(seeded_sampler, drop_last=True)
    seen, state = run(loaders(make, *first, drop_last=True), None, 1)
    made = loaders(make, *second, drop_last=True)
    more, state = run(made, state)
    assert len(more) == left
    assert len({*seen, *more}) == len(seen) + left
    assert state["consumed"] == len(made[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_without_batches_goes_on_too(workers):
    whole, _ = run(loaders(seeded_sampler, 1, 1), None)
    first = loaders(seeded_sampler, 1, 2)[0]
    take(iter(first), 3)
    single = PrefetchLoader(range(LENGTH), None, sampler=SeededSampler(range(LENGTH), 4), num_workers=workers)
    single.load_state_dict(first.state_dict())
    assert [int(index) for index in single] == whole[6:]


class Mine(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__()))


def test_a_class_with_an_iter_of_its_own_goes_on_with_the_same_batches_and_says_so_with_others():
    first, same, other = (PrefetchLoader.of(Mine(range(LENGTH), size, shuffle=True)) for size in (2, 2, 5))
    iterator = iter(first)
    take(iterator, 3)
    state = saved(first.state_dict())
    same.load_state_dict(state)
    assert values(same) == values(iterator)
    with pytest.warns(TurboWarning, match=r"3 batches of this epoch were used, but not which ones.*15 batches of 2"):
        other.load_state_dict(state)


@pytest.mark.parametrize("make", SAMPLERS)
def test_the_state_of_one_rank_serves_all(make):
    """As that of a checkpoint, which the first rank writes; each of the others has samples of its own."""
    whole, _ = run(loaders(make, 3, 2), None)
    seen, state = run(loaders(make, 3, 2), None, 2)
    assert seen + run(loaders(make, 3, 2), state)[0] == whole


def reshuffled(**settings):
    return PrefetchLoader(range(settings.pop("length", LENGTH)), 4, **settings)


@pytest.mark.parametrize(("other", "said"), [
    ({"length": 30}, "length of the dataset: expected 29 as when it was taken, got 30"),
    ({"shuffle": False}, "shuffle: expected True as when it was taken, got False"),
    ({"sampler": SeededSampler(range(LENGTH), 1)}, "sampler: expected RandomSampler as when it was taken, got SeededS"),
    ({"sampler": Lazy(LENGTH)}, "sampler: expected RandomSampler as when it was taken, got Lazy"),
])  # fmt: skip
def test_the_state_of_another_dataset_or_sampler_is_refused_in_the_middle_of_an_epoch(other, said):
    loader = reshuffled(shuffle=True)
    iterator = iter(loader)
    take(iterator, 1)
    now = reshuffled(**({"shuffle": True} if "length" in other else {}), **other)
    with pytest.raises(ValueError, match=said):
        now.load_state_dict(loader.state_dict())
    list(iterator)
    now.load_state_dict(loader.state_dict())


def test_the_state_of_another_seed_is_refused():
    first, second = (reshuffled(sampler=SeededSampler(range(LENGTH), seed)) for seed in (1, 2))
    take(iter(first), 1)
    with pytest.raises(ValueError, match="seed of the sampler: expected 1 as when it was taken, got 2"):
        second.load_state_dict(first.state_dict())
