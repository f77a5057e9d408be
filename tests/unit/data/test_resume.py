"""Stop, save, load, go on: every sample once, in order, whatever was prefetched."""

import io
import itertools
import threading
import time

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_turbo.data import DevicePrefetcher, PrefetchLoader
from lightning_turbo.data.position import correct_states
from lightning_turbo.errors import TurboWarning

pytestmark = [
    pytest.mark.timeout(120),
    # torchdata calls a function of torch that is on its way out.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(20)


def plain(seed=5, **settings):
    return PrefetchLoader(range(20), **settings)


def by_threads(**settings):
    return PrefetchLoader(range(20), threads=1 if settings.get("num_workers") else 3, **settings)


def stateful(**settings):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return PrefetchLoader.of(torchdata.StatefulDataLoader(range(20), **settings))


def inherited(**settings):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    class Both(PrefetchLoader, torchdata.StatefulDataLoader):
        pass

    return Both(range(20), **settings)


def on_device(**settings):
    return DevicePrefetcher(plain(**settings), "cpu", transform=lambda batch: batch + 0)


def on_device_stateful(**settings):
    return DevicePrefetcher(stateful(**settings), "cpu", transform=lambda batch: batch + 0)


def on_device_of_a_plain_loader(**settings):
    return DevicePrefetcher(DataLoader(range(20), **settings), "cpu")


def saved(state):
    """Through a file, as a checkpoint that loads with weights_only=True."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


MAKERS = [plain, by_threads, stateful, inherited, on_device, on_device_stateful]


CASES = [(make, used, 0) for make in MAKERS for used in (0, 2, 6)] + [(make, 3, 2) for make in MAKERS]


@pytest.mark.parametrize(("make", "used", "workers"), CASES)
def test_the_rest_of_the_epoch_is_what_was_not_used(make, used, workers):
    """A for loop drops its iterator at a break; what it had prefetched does not count as used."""
    settings = {"batch_size": 3, "shuffle": True, "num_workers": workers}
    torch.manual_seed(1)
    loader, first = make(**settings), []
    for batch in itertools.islice(loader, used):
        first.append(batch.tolist())
    state = saved(loader.state_dict())
    loader.close()

    torch.manual_seed(2)
    other = make(**settings)
    other.load_state_dict(state)
    rest = [batch.tolist() for batch in other]
    assert len(first) + len(rest) == 7
    if used:  # without a first batch the order is not drawn yet, and comes from the seed of the new process
        assert sorted(itertools.chain(*first, *rest)) == list(range(20))
    following = sorted(itertools.chain(*(batch.tolist() for batch in other)))
    assert following == list(range(20))  # the epoch after it is whole
    other.close()


def test_a_state_survives_a_second_stop():
    torch.manual_seed(1)
    loader = PrefetchLoader(range(20), 3, shuffle=True)
    iterator = iter(loader)
    whole = [next(iterator).tolist() for _ in range(2)]
    state = loader.state_dict()
    reference = whole + [b.tolist() for b in iterator]
    for _ in range(2):
        loader = PrefetchLoader(range(20), 3, shuffle=True)
        loader.load_state_dict(state)
        assert loader.state_dict() == state  # not begun yet
        iterator = iter(loader)
        whole += [next(iterator).tolist() for _ in range(2)]
        state = loader.state_dict()
        del iterator
    assert whole == reference[:6]
    assert state["consumed"] == 6


def test_resuming_leaves_the_process_wide_generators_alone():
    loader = PrefetchLoader(range(20), 3, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.close()
    torch.manual_seed(3)
    fresh = PrefetchLoader(range(20), 3, shuffle=True)
    list(fresh)
    torch.manual_seed(3)
    fresh.load_state_dict(state)
    list(fresh)
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()  # the seed for workers, drawn by every iter()
    reference = torch.rand(3)
    torch.manual_seed(3)
    fresh.load_state_dict(state)
    list(fresh)
    assert torch.equal(torch.rand(3), reference)


class Counts(DataLoader):
    """A loader class that keeps its state itself, not in its iterator."""

    given = start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        self.given = start
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given = number + 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.start = state["given"]


def test_a_loader_class_with_state_of_its_own():
    loader = PrefetchLoader.of(Counts(range(20), batch_size=3))
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    assert state["consumed"] == 2
    other = PrefetchLoader.of(Counts(range(20), batch_size=3))
    other.load_state_dict(loader.state_dict())
    assert [b.tolist() for b in other] == [b.tolist() for b in iterator]


class Shards(IterableDataset):
    """A shard for each of two workers, of unequal length, and a count of its epochs."""

    def __init__(self):
        self.begin = self.at = self.epoch = 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        self.at, self.begin = self.begin, 0
        while self.at < 4 + 5 * worker:
            self.at += 1
            yield 100 * self.epoch + 10 * worker + self.at
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.begin, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_with_a_state_in_each_worker_begins_its_next_epoch(persistent):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        settings = {"batch_size": None, "num_workers": 2, "persistent_workers": persistent}
        return PrefetchLoader.of(torchdata.StatefulDataLoader(Shards(), **settings))

    loader = make()
    assert len(list(loader)) == 13
    state = saved(loader.state_dict())
    following = list(loader)
    other = make()
    other.load_state_dict(state)
    assert [int(item) for item in other] == [int(item) for item in following]
    loader.close()
    other.close()


def test_a_loader_without_state_is_counted():
    loader = on_device_of_a_plain_loader(batch_size=3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.state_dict() == {"consumed": 2, "whole": False, "ended": False, "length": 7}
    other = on_device_of_a_plain_loader(batch_size=3)
    other.load_state_dict({"consumed": 2})
    assert [b.tolist() for b in other] == [b.tolist() for b in iterator]
    assert other.state_dict() == {"consumed": 7, "whole": True, "ended": True, "length": 7}
    again = on_device_of_a_plain_loader(batch_size=3)
    again.load_state_dict(other.state_dict())
    assert len(list(again)) == 7


def test_states_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"A state with the keys \['x'\] does not belong to PrefetchLoader"):
        PrefetchLoader(range(3)).load_state_dict({"x": 1})
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    own = PrefetchLoader.of(torchdata.StatefulDataLoader(Stream()))  # a stream, whose state torchdata tells
    with pytest.raises(ValueError, match="does not belong to PrefetchStatefulDataLoader"):
        own.load_state_dict({"consumed": 1, "order": None})


class Slow(Dataset):
    """So slow that a thread works ahead."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.001)
        return index


class Drawn(Sampler):
    """Draws its order from a generator that it holds."""

    def __init__(self, rng, permute):
        self.rng, self.permute = rng, permute

    def __iter__(self):
        return iter(self.permute(self.rng))

    def __len__(self):
        return 20


class Batches(Sampler):
    """A batch sampler with a sampler under a name of its own."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        order = list(self.inner)
        yield from (order[n : n + 3] for n in range(0, 20, 3))

    def __len__(self):
        return 7


def seeded(seed):
    return torch.Generator().manual_seed(seed)


OWN = {
    "torch": lambda: {"batch_size": 3, "shuffle": True, "generator": seeded(0)},
    "own sampler": lambda: {
        "batch_size": 3, "sampler": Drawn(seeded(0), lambda rng: torch.randperm(20, generator=rng).tolist()),
    },
    "own batch sampler": lambda: {"batch_sampler": Batches(RandomSampler(range(20), generator=seeded(0)))},
    "wrapped by Lightning": lambda: {
        "batch_size": 3,
        "sampler": DistributedSamplerWrapper(
            WeightedRandomSampler([1.0] * 20, 20, replacement=False, generator=seeded(0)), num_replicas=1, rank=0
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("used", [2, 7, "all"])
@pytest.mark.parametrize("settings", OWN.values(), ids=OWN)
def test_a_later_epoch_goes_on_whatever_its_order_comes_from(settings, used):
    """From its middle, after its last batch, and after its end."""
    loader = PrefetchLoader(range(20), **settings())
    list(loader)
    iterator = iter(loader)
    for _ in range(7 if used == "all" else used):
        next(iterator)
    assert used != "all" or next(iterator, None) is None
    state = saved(loader.state_dict())
    expected = [] if used in (7, "all") else [batch.tolist() for batch in iterator]
    expected += [batch.tolist() for batch in loader]

    other = PrefetchLoader(range(20), **settings())
    other.load_state_dict(state)
    got = [batch.tolist() for batch in other]
    if len(got) < 7:
        got += [batch.tolist() for batch in other]
    assert got == expected


def test_a_state_of_other_samplers_is_refused():
    loader = PrefetchLoader(range(20), **OWN["torch"]())
    next(iter(loader))
    other = PrefetchLoader(range(20), 3, shuffle=True)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"a loader with 1 random generators, and this one has 0"):
        next(iter(other))


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: DevicePrefetcher(loader, "cpu", transform=abs)])
def test_the_orders_are_those_of_the_plain_loader_whether_the_end_is_asked_for_or_not(wrap, at_the_end):
    """RandomSampler draws once more at its end, which a Trainer does not ask for."""

    def orders(cls):
        loader = cls(Slow(), 4, shuffle=True, generator=seeded(0))
        loader = wrap(loader) if cls is PrefetchLoader else loader
        for _ in range(3):
            iterator = iter(loader)
            yield [next(iterator).tolist() for _ in range(5)]
            if cls is PrefetchLoader:
                deadline = time.monotonic() + 20
                while any("prefetch" in thread.name for thread in threading.enumerate()):  # it has asked
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            assert not at_the_end or next(iterator, None) is None

    assert list(orders(PrefetchLoader)) == list(orders(DataLoader))


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, ValueError])
def test_a_length_that_cannot_be_told(error):
    class Sampling(Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            return iter(range(20))

        def __len__(self):
            raise error

    class Streaming(Stream):
        def __len__(self):
            raise error

    for make in (lambda: PrefetchLoader(range(20), 3, sampler=Sampling()), lambda: PrefetchLoader(Streaming(), 3)):
        loader = make()
        iterator = iter(loader)
        next(iterator)
        other = make()
        other.load_state_dict(saved(loader.state_dict()))
        assert [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator]
        loader.start_next_epoch()
        loader.close()


@pytest.mark.parametrize("make", [plain, on_device_of_a_plain_loader])
def test_an_epoch_may_end_before_a_loader_and_go_on_after_it(make):
    loader = make(batch_size=3)
    list(loader)
    ended = saved(loader.state_dict())
    iterator = iter(loader)
    next(iterator)
    begun = saved(loader.state_dict())

    for state, over, batches in ((ended, True, 7), (ended, False, 0), (begun, True, 7), (begun, False, 6)):
        other = make(batch_size=3)
        states = [dict(state), {"whole": 1}, None]
        correct_states(states, over)
        assert states[1:] == [{"whole": 1}, None]  # of other loaders
        other.load_state_dict(states[0])
        assert len(list(other)) == batches
        assert len(list(other)) == 7


def test_an_epoch_that_was_begun_is_not_over():
    loader = PrefetchLoader(range(20), **OWN["torch"]())
    list(loader)
    assert loader.start_next_epoch()
    state = saved(loader.state_dict())
    correct_states([state], over=True)
    other = PrefetchLoader(range(20), **OWN["torch"]())
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]


class Repeats(DataLoader):
    """As MONAI's ThreadDataLoader does."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


@pytest.mark.parametrize("used", [3, 9])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_class_that_hands_out_batches_twice(used, workers):
    def build(seed):
        torch.manual_seed(seed)
        return PrefetchLoader.of(Repeats(range(20), batch_size=3, shuffle=True, num_workers=workers))

    loader = build(1)
    iterator = iter(loader)
    for _ in range(used):
        next(iterator)
    state = saved(loader.state_dict())
    rest = [batch.tolist() for batch in iterator]
    assert len(rest) == 14 - used
    other = build(2)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest


def test_batches_out_of_order_cannot_be_counted_which_is_said():
    settings = {"batch_size": 3, "num_workers": 1, "in_order": False}
    loader = plain(**settings)
    with pytest.warns(TurboWarning, match="in_order=False hands out batches as they are ready.*Leave in_order=False"):
        loader.load_state_dict({"consumed": 2, "order": None, "own": [], "whole": False})
    loader.load_state_dict({"consumed": 7, "order": None, "own": [], "whole": True})  # a warning would be an error
    plain(**{**settings, "num_workers": 0}).load_state_dict({"consumed": 2, "order": None})


@pytest.mark.parametrize("build", [plain, on_device_of_a_plain_loader])
def test_a_loader_of_another_length_cannot_go_on_exactly_which_is_said(build):
    loader = build(batch_size=3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.warns(TurboWarning, match="The loader had 7 batches then and has 4 now. Go on with the same dataset"):
        build(batch_size=5).load_state_dict(loader.state_dict())
    list(iterator)
    build(batch_size=5).load_state_dict(loader.state_dict())  # a whole epoch; a warning would be an error
    build(batch_size=3).load_state_dict({"consumed": 2, "order": None})  # of an older version


class Closable:
    """A loader with a close() that is for good, as webdataset's is."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def close(self):
        del self.batches


def test_a_foreign_loader_is_not_closed():
    loader = Closable([1, 2, 3])
    prefetcher = DevicePrefetcher(loader, "cpu")
    iterator = iter(prefetcher)
    next(iterator)
    prefetcher.load_state_dict(prefetcher.state_dict())
    assert list(prefetcher) == [2, 3]
    prefetcher.close()
    assert list(prefetcher) == [1, 2, 3]


def test_a_loader_of_this_library_is_closed():
    loader = plain(batch_size=3)
    iterator = iter(DevicePrefetcher(loader, "cpu", transform=lambda batch: batch))
    next(iterator)
    DevicePrefetcher(DevicePrefetcher(loader, "cpu"), "cpu").close()
    with pytest.raises(RuntimeError, match="its loader was closed"):
        list(iterator)
