"""An epoch that is begun before the last step of the one before it: the same batches, sooner."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_turbo.data import DevicePrefetcher, PrefetchLoader, prefetcher
from tests.leftovers import nothing_is_left, wait_until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
WORKERS = [
    {"num_workers": 0},
    {"num_workers": 0, "threads": 3},
    {"num_workers": 1},
    {"num_workers": 1, "persistent_workers": True},
]


class Noted(Dataset):
    """Notes what was asked for."""

    def __init__(self, length=20, error_at=None):
        self.length, self.asked, self.error_at = length, [], error_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        if len(self.asked) == self.error_at:
            raise ValueError("this one is broken")
        return index


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(20) if info is None else range(info.id, 20, info.num_workers)


def plain_loader(dataset, threads=1, **settings):
    return DataLoader(dataset, **settings)


def epochs(loader, count, early=False, between=lambda: None):
    """The batches of some epochs; ``between`` stands for the last step and validation."""
    seen = []
    for number in range(count):
        seen.append([])
        for index, batch in enumerate(loader):
            seen[-1].append(torch.as_tensor(batch).tolist())
            if early and index == len(loader) - 1 and number < count - 1:
                assert loader.start_next_epoch()
        between()
    return seen


CASES = [(case, {"batch_size": 3}, number % 2) for number, case in enumerate(WORKERS)]
CASES += [({}, {"batch_size": 3, "drop_last": True}, 1), ({}, {"batch_size": None}, 0)]


@pytest.mark.parametrize(("workers", "batches", "wrapped"), CASES)
def test_batches_and_generators_are_those_of_the_plain_loader(workers, batches, wrapped):
    settings = {"shuffle": True, **batches, **workers}
    torch.manual_seed(3)
    expected, after = epochs(plain_loader(range(20), **settings), 4), torch.get_rng_state()
    torch.manual_seed(3)
    loader = PrefetchLoader(range(20), **settings)
    assert epochs(DevicePrefetcher(loader, "cpu") if wrapped else loader, 4, early=True) == expected
    assert torch.equal(torch.get_rng_state(), after)
    loader.close()
    nothing_is_left()


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
@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: DevicePrefetcher(loader, "cpu")])
def test_a_subclass_may_iterate_in_its_own_way(workers, wrap):
    def squared(cls):
        class Squared(cls):
            def __iter__(self):
                for batch in super().__iter__():
                    yield batch**2

        return Squared(range(20), 3, shuffle=True, generator=torch.Generator().manual_seed(1), **settings)

    settings = dict(workers)
    loader = squared(PrefetchLoader)
    settings.pop("threads", None)
    assert epochs(wrap(loader), 3, early=True) == epochs(squared(DataLoader), 3)
    loader.close()
    nothing_is_left()


def test_the_first_batches_are_loaded_before_they_are_asked_for():
    data = Noted()
    loader = PrefetchLoader(data, batch_size=4, prefetch_batches=2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert loader.start_next_epoch()
    wait_until(lambda: len(data.asked) == 20 + 12)  # two ready and one in the thread's hands
    assert list(iterator) == []  # the epoch that was left has its ordinary end
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    loader.close()
    nothing_is_left()


def test_worker_processes_begin_too():
    shared = torch.zeros(1, dtype=torch.int64).share_memory_()

    class Counts(Noted):
        def __getitem__(self, index):
            shared.add_(1)
            return index

    loader = PrefetchLoader(Counts(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 5
    assert shared.item() == 20
    assert loader.start_next_epoch()
    wait_until(lambda: shared.item() > 20)
    assert len(list(loader)) == 5
    nothing_is_left()


@pytest.mark.parametrize("workers", WORKERS[::3])
def test_a_distributed_sampler_has_the_epoch_it_was_told(workers):
    def loaders(cls):
        return cls(range(20), batch_size=3, sampler=DistributedSampler(range(20), 2, 0), **workers)

    expected = []
    plain = loaders(plain_loader)
    for epoch in range(3):
        plain.sampler.set_epoch(epoch)
        expected.append([batch.tolist() for batch in plain])
    del plain  # and its worker processes
    loader, seen = loaders(PrefetchLoader), []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # once more, as Lightning does
        seen.append([])
        for index, batch in enumerate(loader):
            seen[-1].append(batch.tolist())
            if index == len(loader) - 1:
                loader.sampler.set_epoch(epoch + 1)
                loader.start_next_epoch()
    assert seen == expected
    loader.close()
    nothing_is_left()


@pytest.mark.parametrize(("workers", "used"), [(WORKERS[0], 0), (WORKERS[0], 4), (WORKERS[1], 1), (WORKERS[2], 1)])
@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: DevicePrefetcher(loader, "cpu", transform=abs)])
def test_a_checkpoint_keeps_the_order_that_was_drawn(workers, wrap, used):
    def make():
        return wrap(PrefetchLoader(range(20), batch_size=3, shuffle=True, **workers))

    loader = make()
    for index, _ in enumerate(loader):
        if index == 6:
            assert loader.start_next_epoch()
    begun = io.BytesIO()
    torch.save(loader.state_dict(), begun)
    torch.rand(5)
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(used)]
    later = copy.deepcopy(loader.state_dict())
    rest = [batch.tolist() for batch in iterator]
    assert sorted(itertools.chain(*first, *rest)) == list(range(20))
    loader.close()

    torch.manual_seed(99)
    begun.seek(0)
    other = make()
    other.load_state_dict(torch.load(begun, weights_only=True))
    assert other.state_dict()["consumed"] == 0
    assert [batch.tolist() for batch in other] == first + rest
    if used:
        other.load_state_dict(later)
        assert [batch.tolist() for batch in other] == rest
    second = epochs(other, 1)  # and what follows is drawn anew
    assert sorted(itertools.chain(*second[0])) == list(range(20))
    assert second[0] != first + rest
    other.close()
    nothing_is_left()


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
        seen = [batch.tolist() for batch in loader]
        loader.close()
        return seen

    assert order_after(drop=True) == order_after(drop=False)


@pytest.mark.parametrize("workers", WORKERS[::2])
def test_an_epoch_that_is_left_early_cannot_go_on(workers):
    loader = PrefetchLoader(range(20), batch_size=3, **workers)
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.start_next_epoch()
    with pytest.raises(RuntimeError, match="cannot continue"):
        next(iterator)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in DataLoader(range(20), batch_size=3)]
    loader.close()
    nothing_is_left()


@pytest.mark.parametrize("workers", WORKERS[::3])
@pytest.mark.parametrize("end", ["close", "drop", "second"])
def test_nothing_is_left_of_an_epoch_that_nobody_came_for(workers, end):
    loader = PrefetchLoader(range(20), batch_size=3, **workers)
    list(loader)
    assert loader.start_next_epoch()
    assert loader.start_next_epoch()  # it is begun already
    if end == "close":
        loader.close()
    elif end == "second":
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2]
        assert next(iter(loader)).tolist() == [0, 1, 2]
        del iterator
        loader.close()
    del loader
    nothing_is_left()


def test_who_cannot_begin_early_says_so():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    stateful = PrefetchLoader.of(torchdata.StatefulDataLoader(Stream(), batch_size=3))
    for loader in (stateful, PrefetchLoader(Stream(), batch_size=3)):
        first = [batch.tolist() for batch in loader]
        assert loader.start_next_epoch() is False
        assert [batch.tolist() for batch in loader] == first
        loader.close()
    assert DevicePrefetcher([torch.ones(1)], "cpu").start_next_epoch() is False
    assert DevicePrefetcher(DataLoader(range(3)), "cpu").start_next_epoch() is False


def test_an_iterable_dataset_with_workers():
    loader = PrefetchLoader(Stream(), batch_size=3, num_workers=2, persistent_workers=True)
    first = [batch.tolist() for batch in loader]
    assert loader.start_next_epoch()
    assert [batch.tolist() for batch in loader] == first
    assert [batch.tolist() for batch in loader] == first
    loader.close()
    nothing_is_left()


def test_an_error_is_raised_at_its_batch():
    data = Noted(error_at=25)
    loader = PrefetchLoader(data, batch_size=4)
    list(loader)
    assert loader.start_next_epoch()
    wait_until(lambda: len(data.asked) == 25)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="this one is broken"):
        next(iterator)
    nothing_is_left()


def test_copies_begin_at_their_own_start():
    loader = PrefetchLoader(range(6), batch_size=3)
    list(loader)
    assert loader.start_next_epoch()
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), PrefetchLoader.of(loader)):
        assert [batch.tolist() for batch in other] == [[0, 1, 2], [3, 4, 5]]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    nothing_is_left()
