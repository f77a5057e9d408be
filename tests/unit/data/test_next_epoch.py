"""An epoch that is begun before the last step of the one before it: the same batches, sooner."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo.data import DevicePrefetcher, PrefetchLoader, prefetcher
from tests.leftovers import nothing_is_left, wait_until
from tests.unit.data.samples import Rows, Stream, saved, seeded, take, values

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
WORKERS = [
    {"num_workers": 0},
    {"num_workers": 0, "threads": 3},
    {"num_workers": 1},
    {"num_workers": 1, "persistent_workers": True},
]


def plain_loader(dataset, threads=1, **settings):
    return DataLoader(dataset, **settings)


def as_it_is(loader):
    return loader


def on_device(loader, transform=None):
    return DevicePrefetcher(loader, "cpu", transform=transform)


def epochs(loader, count, early=False, between=lambda: None, sets_epochs=False):
    """The batches of some epochs; ``between`` stands for the last step and validation."""
    seen = []
    for number in range(count):
        seen.append([])
        if sets_epochs:
            loader.sampler.set_epoch(number)  # once more where it was begun early, as Lightning does
        for index, batch in enumerate(loader):
            seen[-1].append(torch.as_tensor(batch).tolist())
            if early and index == len(loader) - 1 and number < count - 1:
                if sets_epochs:
                    loader.sampler.set_epoch(number + 1)
                assert loader.start_next_epoch()
        between()
    return seen


CASES = [(case, {"batch_size": 3}, (as_it_is, on_device)[number % 2]) for number, case in enumerate(WORKERS)]
CASES += [({}, {"batch_size": 3, "drop_last": True}, on_device), ({}, {"batch_size": None}, as_it_is)]


@pytest.mark.parametrize(("workers", "batches", "wrap"), CASES)
def test_batches_and_generators_are_those_of_the_plain_loader(workers, batches, wrap):
    settings = {"shuffle": True, **batches, **workers}
    torch.manual_seed(3)
    expected, after = epochs(plain_loader(range(20), **settings), 4), torch.get_rng_state()
    torch.manual_seed(3)
    assert epochs(wrap(PrefetchLoader(range(20), **settings)), 4, early=True) == expected
    assert torch.equal(torch.get_rng_state(), after)


def test_a_seed_gives_one_order_however_long_loading_takes(monkeypatch):
    """Whether a thread pays is a matter of time; the order must not be."""

    def run():
        torch.manual_seed(3)
        loader = PrefetchLoader(range(20), batch_size=3, shuffle=True)
        seen = epochs(loader, 4, early=True, between=lambda: torch.rand(3))
        return seen, torch.get_rng_state().tolist()

    expected = run()
    monkeypatch.setattr(prefetcher, "WORTH", 1e9)
    assert run() == expected


@pytest.mark.parametrize("workers", WORKERS[::2])
@pytest.mark.parametrize("wrap", [as_it_is, on_device])
def test_a_subclass_may_iterate_in_its_own_way(workers, wrap):
    def squared(cls):
        class Squared(cls):
            def __iter__(self):
                for batch in super().__iter__():
                    yield batch**2

        return Squared(range(20), 3, shuffle=True, generator=seeded(1), **workers)

    assert epochs(wrap(squared(PrefetchLoader)), 3, early=True) == epochs(squared(DataLoader), 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_batches_are_loaded_before_they_are_asked_for(workers):
    asked = torch.zeros(1, dtype=torch.int64).share_memory_()
    data = Rows(20, lambda index: [index, asked.add_(1)][0])
    context = {"multiprocessing_context": "fork"} if workers else {}
    loader = PrefetchLoader(data, batch_size=4, prefetch_batches=2, num_workers=workers, **context)
    iterator = iter(loader)
    take(iterator, 5)
    assert loader.start_next_epoch()
    wait_until(lambda: asked.item() == 20 + (20 if workers else 12))  # two ready and one in the thread's hands
    assert list(iterator) == []  # the epoch that was left has its ordinary end
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", WORKERS[::3])
def test_a_distributed_sampler_has_the_epoch_it_was_told(workers):
    def seen(cls, **early):
        loader = cls(range(20), batch_size=3, sampler=DistributedSampler(range(20), 2, 0), **workers)
        return epochs(loader, 3, sets_epochs=True, **early)

    assert seen(PrefetchLoader, early=True) == seen(DataLoader)


@pytest.mark.parametrize(("workers", "used"), [(WORKERS[0], 0), (WORKERS[0], 4), (WORKERS[1], 1), (WORKERS[2], 1)])
@pytest.mark.parametrize("wrap", [as_it_is, lambda loader: on_device(loader, transform=abs)])
def test_a_checkpoint_keeps_the_order_that_was_drawn(workers, wrap, used):
    def make():
        return wrap(PrefetchLoader(range(20), batch_size=3, shuffle=True, **workers))

    loader = make()
    last = iter(loader)
    take(last, 7)
    assert loader.start_next_epoch()
    begun = saved(loader.state_dict())
    torch.rand(5)
    iterator = iter(loader)
    first = take(iterator, used)
    later = copy.deepcopy(loader.state_dict())
    rest = values(iterator)
    assert sorted(itertools.chain(*first, *rest)) == list(range(20))

    torch.manual_seed(99)
    other = make()
    other.load_state_dict(begun)
    assert other.state_dict()["consumed"] == 0
    assert values(other) == first + rest
    if used:
        other.load_state_dict(later)
        assert values(other) == rest
    following = values(other)  # which are drawn anew
    assert sorted(itertools.chain(*following)) == list(range(20))
    assert following != first + rest


def test_loading_its_own_state_ends_what_was_begun_and_keeps_its_order():
    def order_after(drop):
        torch.manual_seed(0)
        loader = PrefetchLoader(range(20), batch_size=3, shuffle=True)
        list(loader)
        assert loader.start_next_epoch()
        if drop:
            loader.load_state_dict(loader.state_dict())
            nothing_is_left()
            torch.rand(3)
        return values(loader)

    assert order_after(drop=True) == order_after(drop=False)


@pytest.mark.parametrize("workers", WORKERS[::2])
def test_an_epoch_that_is_left_early_cannot_go_on(workers):
    loader = PrefetchLoader(range(20), batch_size=3, **workers)
    iterator = iter(loader)
    take(iterator, 2)
    assert loader.start_next_epoch()
    with pytest.raises(RuntimeError, match="cannot continue"):
        next(iterator)
    assert values(loader) == values(DataLoader(range(20), batch_size=3))


@pytest.mark.parametrize("workers", WORKERS[::3])
@pytest.mark.parametrize("end", ["close", "drop", "second"])
def test_nothing_is_left_of_an_epoch_that_nobody_came_for(workers, end):
    loader = PrefetchLoader(range(20), batch_size=3, **workers)
    list(loader)
    assert loader.start_next_epoch()
    assert loader.start_next_epoch()  # it is begun already
    if end == "second":
        first = iter(loader)
        assert [take(first, 1), take(iter(loader), 1)] == [[[0, 1, 2]]] * 2
        del first
    if end != "drop":
        loader.close()
        nothing_is_left()


def test_who_cannot_begin_early_says_so():
    for loader in (PrefetchLoader.of(StatefulDataLoader(Stream(), batch_size=3)), PrefetchLoader(Stream(), 3)):
        first = values(loader)
        assert loader.start_next_epoch() is False
        assert values(loader) == first
    assert on_device([torch.ones(1)]).start_next_epoch() is False
    assert on_device(DataLoader(range(3))).start_next_epoch() is False


def test_an_iterable_dataset_with_workers():
    loader = PrefetchLoader(Stream(), batch_size=3, num_workers=2, persistent_workers=True)
    first = values(loader)
    assert loader.start_next_epoch()
    assert values(loader) == first
    assert values(loader) == first


def test_an_error_is_raised_at_its_batch():
    asked = []

    def load(index):
        asked.append(index)
        if len(asked) == 25:
            raise ValueError("this one is broken")
        return index

    loader = PrefetchLoader(Rows(20, load), batch_size=4)
    list(loader)
    assert loader.start_next_epoch()
    wait_until(lambda: len(asked) == 25)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="this one is broken"):
        next(iterator)


def test_copies_begin_at_their_own_start():
    loader = PrefetchLoader(range(6), batch_size=3)
    list(loader)
    assert loader.start_next_epoch()
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), PrefetchLoader.of(loader), loader):
        assert values(other) == [[0, 1, 2], [3, 4, 5]]
