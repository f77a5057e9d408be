"""Classes made of PrefetchLoader and another class of loader; copies and pickles of loaders."""

import copy
import inspect
import pickle

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading.subclass import copy_loader
from tests.data.samples import Custom, seeded, take, values

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


def test_other_classes_of_loader_can_be_converted():
    loader = Custom("here", scale=10, batch_size=2)
    twin = PrefetchLoader.of(loader, prefetch_batches=3)
    assert isinstance(twin, PrefetchLoader)
    assert isinstance(twin, Custom)
    assert (twin.prefetch_batches, twin.threads, twin.path) == (3, 1, "here")
    assert values(twin) == [[0, 10], [20, 30], [40, 50]]
    assert type(loader) is Custom
    assert type(PrefetchLoader.of(loader)) is type(twin)
    assert list(inspect.signature(type(twin).__init__).parameters) == [
        "self", "path", "scale", "prefetch_batches", "threads", "transfer", "sample_seeds", "kwargs",
    ]  # fmt: skip
    assert values(type(twin)(path="there", batch_size=3, prefetch_batches=2)) == [[0, 1, 2], [3, 4, 5]]


class Threaded(DataLoader):
    """Has an argument of its own that PrefetchLoader has too."""

    def __init__(self, *args, threads=3, **kwargs):
        super().__init__(*args, **kwargs)
        self.lanes = threads


class Transfers(DataLoader):
    """Has an attribute of its own that PrefetchLoader has too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.transfer = "by post"


@pytest.mark.parametrize(("kind", "name"), [(Threaded, "threads"), (Transfers, "transfer")])
def test_a_class_to_which_an_added_name_means_something_else_is_refused_in_words(kind, name):
    loader = kind(range(6))
    with pytest.raises(TypeError, match=f"without an argument or attribute '{name}', got {kind.__name__}"):
        PrefetchLoader.of(loader)
    twin = PrefetchLoader.of(PrefetchLoader(range(6), threads=2), threads=3)
    assert twin.threads == 3


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_and_pickles(convert, through):
    loader = PrefetchLoader.of(Custom("x", batch_size=2)) if convert else PrefetchLoader(range(6), 2)
    iterator = iter(loader)
    take(iterator, 2)
    twin = through(loader)
    assert type(twin) is type(loader)
    assert values(twin) == [[0, 1], [2, 3], [4, 5]]
    assert take(iterator, 1) == [[4, 5]]


def test_a_pickled_loader_tells_where_it_is_before_its_first_batch():
    loader = PrefetchLoader(range(6), 2, shuffle=True, generator=seeded(1))
    twin = pickle.loads(pickle.dumps(loader))
    iterators = [iter(loader), iter(twin)]
    (own,), (twins,) = (each.state_dict()["generators"] for each in (loader, twin))
    assert torch.equal(own, twins)
    assert values(iterators[0]) == values(iterators[1])


def test_a_copy_keeps_records_of_its_own():
    """As a Trainer makes them, of what was set on a loader."""
    loader = PrefetchLoader(range(6), 2)
    setattr(loader, "__records", ["one"])
    twin = copy_loader(loader)
    getattr(twin, "__records").append("two")
    assert getattr(loader, "__records") == ["one"]
    assert twin.dataset is loader.dataset


def test_a_loader_of_another_class_has_the_state_of_that_class_before_its_first_epoch():
    plain = StatefulDataLoader(range(6), batch_size=2)
    loader = PrefetchLoader.of(StatefulDataLoader(range(6), batch_size=2))
    assert loader.state_dict().keys() == plain.state_dict().keys()
    assert values(loader) == [[0, 1], [2, 3], [4, 5]]
