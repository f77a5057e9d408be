"""Stop, save, load, go on: every sample once, in order, whatever was prefetched."""

import io
import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_turbo.data import DevicePrefetcher, PrefetchLoader

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
    return PrefetchLoader(range(20), prefetch_threads=1 if settings.get("num_workers") else 3, **settings)


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


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("used", [0, 1, 2, 5, 6])
def test_the_rest_of_the_epoch_is_what_was_not_used(make, used):
    check(make, used, {"batch_size": 3, "shuffle": True})


@pytest.mark.parametrize("make", MAKERS)
def test_the_rest_of_the_epoch_with_workers(make):
    check(make, 2, {"batch_size": 3, "shuffle": True, "num_workers": 2})


def check(make, used, settings):
    torch.manual_seed(1)
    loader = make(**settings)
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(used)]
    state = saved(loader.state_dict())
    rest = [batch.tolist() for batch in iterator]
    assert sorted(itertools.chain(*first, *rest)) == list(range(20))
    loader.close()

    torch.manual_seed(2)
    other = make(**settings)
    other.load_state_dict(state)
    if used:  # without a first batch the order is not drawn yet, and comes from the seed of the new process
        assert [batch.tolist() for batch in other] == rest
    else:
        assert len(list(other)) == 7
    assert sorted(itertools.chain(*(batch.tolist() for batch in other))) == list(
        range(20)
    )  # the epoch after it is whole
    other.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 3, "shuffle": True, "generator": "own"},
        {"batch_sampler": "random"},
        {"batch_size": None, "shuffle": True},
        {"batch_size": 3},
    ],
)
def test_other_samplers(settings):
    def build(seed):
        chosen = dict(settings)
        torch.manual_seed(seed)
        if "generator" in chosen:
            chosen["generator"] = torch.Generator().manual_seed(seed)
        if "batch_sampler" in chosen:
            generator = torch.Generator().manual_seed(seed)
            chosen["batch_sampler"] = BatchSampler(RandomSampler(range(20), generator=generator), 4, False)
        return PrefetchLoader(range(20), **chosen)

    loader = build(1)
    iterator = iter(loader)
    next(iterator), next(iterator), next(iterator)
    state = saved(loader.state_dict())
    rest = [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in iterator]
    after = [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]

    other = build(2)
    other.load_state_dict(state)
    assert [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in other] == rest
    if "generator" in settings or "batch_sampler" in settings:  # their own generator goes on where it stood
        assert [batch.tolist() for batch in other] == after


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_there_after_a_break(make, workers):
    """A for loop drops its iterator at a break; what it had prefetched does not count as used."""
    settings = {"batch_size": 3, "shuffle": True, "num_workers": workers}
    loader = make(**settings)
    used = []
    for batch in loader:
        used += batch.tolist()
        if len(used) == 9:
            break
    state = saved(loader.state_dict())
    loader.close()
    other = make(**settings)
    other.load_state_dict(state)
    rest = [n for batch in other for n in batch.tolist()]
    assert sorted(used + rest) == list(range(20))
    assert len(rest) == 11
    other.close()


@pytest.mark.parametrize("make", MAKERS)
def test_after_a_whole_epoch_the_next_one_is_whole(make):
    loader = make(batch_size=3, shuffle=True)
    iterator = iter(loader)
    list(iterator)
    other = make(batch_size=3, shuffle=True)
    other.load_state_dict(saved(loader.state_dict()))
    assert sorted(n for batch in other for n in batch.tolist()) == list(range(20))


def test_an_iterable_dataset_is_run_through_what_was_used():
    loader = PrefetchLoader(Stream(), 3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    other = PrefetchLoader(Stream(), 3)
    other.load_state_dict(state)
    assert [b.tolist() for b in other] == [b.tolist() for b in iterator]


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
    assert loader.state_dict() == {"given": 2}
    other = PrefetchLoader.of(Counts(range(20), batch_size=3))
    other.load_state_dict(loader.state_dict())
    assert [b.tolist() for b in other] == [b.tolist() for b in iterator]


def test_a_loader_without_state_is_counted():
    loader = on_device_of_a_plain_loader(batch_size=3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.state_dict() == {"consumed": 2}
    other = on_device_of_a_plain_loader(batch_size=3)
    other.load_state_dict({"consumed": 2})
    assert [b.tolist() for b in other] == [b.tolist() for b in iterator]
    assert other.state_dict() == {"consumed": 0}


def test_states_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"A state with the keys \['x'\] does not belong to PrefetchLoader"):
        PrefetchLoader(range(3)).load_state_dict({"x": 1})
    with pytest.raises(ValueError, match="does not belong to PrefetchStatefulDataLoader"):
        stateful().load_state_dict({"consumed": 1, "order": None})
