"""check_resume reports errors of loaders that are stopped and resumed; loaders of this package have none."""

import dataclasses
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import PrefetchLoader
from lightning_turbo.testing import check_resume, report_resume

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
DATA = TensorDataset(torch.arange(24), torch.randn(24, 3, generator=torch.Generator().manual_seed(0)))


class Stream(IterableDataset):
    """A stream that saves its position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 24:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def make(cls=PrefetchLoader, data=DATA, **settings):
    return lambda workers: cls(data, batch_size=4, num_workers=workers, **settings)


def of_the_batch(samples):
    """A batch with one number of its own, beside those of its samples."""
    return torch.tensor(samples), torch.tensor(sum(samples))


@pytest.mark.parametrize("make_loader", [
    make(shuffle=True), make(), make(StatefulDataLoader, shuffle=True),
    lambda workers: PrefetchLoader(Stream(), batch_size=4),
    lambda workers: PrefetchLoader([{"text": f"{row}", "row": row} for row in range(10)], batch_size=3, shuffle=True),
    lambda workers: PrefetchLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 1)),
    lambda workers: PrefetchLoader(range(10), batch_size=3, shuffle=True, collate_fn=of_the_batch),
], ids=["shuffled", "in order", "torchdata", "stream", "texts", "one rank", "no samples"])  # fmt: skip
def test_loaders_that_resume_exactly_pass(make_loader):
    check_resume(make_loader, workers=(0,))


def test_loaders_with_worker_processes_pass():
    check_resume(make(shuffle=True), stops=1, workers=(2,))


def test_a_number_of_ranks_that_changes_at_each_stop():
    def loader(workers, rank, ranks):
        return PrefetchLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, ranks, rank))

    check_resume(loader, workers=(0,), ranks=(1, 2))


class Forgets(DataLoader):
    """Restarts its epoch."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Skips(StatefulDataLoader):
    """Skips the next batch after it is resumed."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.skip = True

    def __iter__(self):
        iterator = super().__iter__()
        if getattr(self, "skip", False):
            next(iterator, None)
        self.skip = False
        return iterator


@pytest.mark.parametrize(("make_loader", "message"), [
    (make(Forgets), r"workers=0: epoch 0, stopped after samples \[.*\]: \d+ of 24 samples were seen once too often \("),
    (make(Skips), r"of 24 samples were seen never \("),
    (make(Skips, range(24), collate_fn=of_the_batch), r"of 6 samples were seen never \("),
    (make(Skips, shuffle=True), r"epoch 1, .* of 24 samples were seen never \("),
])  # fmt: skip
def test_the_error_describes_the_samples(make_loader, message):
    with pytest.raises(AssertionError, match=r"The loader does not resume exactly\.\n(.|\n)*" + message):
        check_resume(make_loader, workers=(0,))


class Reverses(PrefetchLoader):
    """Reverses the epoch after it is resumed."""

    def load_state_dict(self, state):
        self.resumed = True

    def __iter__(self):
        batches = list(super().__iter__())
        return iter(batches[::-1] if getattr(self, "resumed", False) else batches)


def test_another_order_is_reported_and_global_random_states_are_unchanged():
    state = torch.get_rng_state()
    with pytest.raises(AssertionError, match="each sample was seen once, but in another order from sample 0 on"):
        check_resume(make(Reverses), workers=(0,), stops=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_report_counts():
    report = report_resume(make(Forgets), stops=0, workers=0, epochs=3)
    assert (report.twice, report.never, report.in_order, report.stops, report.samples) == (0, 0, True, 3, 72)
    report = report_resume(make(Forgets), stops=2, workers=0, epochs=1)
    assert report.twice > 0 == report.never
    assert not report.in_order


@dataclasses.dataclass
class Texts:
    tokens: torch.Tensor


Pair = namedtuple("Pair", ["tokens", "rest"])
KINDS = {
    "UserDict": lambda tokens: UserDict({"tokens": tokens}),
    "dataclass": Texts,
    "namedtuple": lambda tokens: Pair(tokens, [Texts(tokens)]),
    "array": lambda tokens: tokens.numpy(),
    "array of objects": lambda tokens: np.array([{"tokens": row.tolist()} for row in tokens], dtype=object),
    "bfloat16": lambda tokens: tokens.bfloat16(),
    "float8": lambda tokens: tokens.to(torch.float8_e4m3fn),
    "complex, transposed": lambda tokens: (tokens * 1j).t().conj(),
    "sparse": lambda tokens: {"tokens": tokens.to_sparse()},
    "nested": lambda tokens: torch.nested.nested_tensor(list(tokens), layout=torch.jagged),
    "bytes": lambda tokens: [row.numpy().tobytes() for row in tokens],
}


class Padded(PrefetchLoader):
    """Its batches differ in the middle of a long row, which a printed text leaves out."""

    kind: staticmethod

    def __iter__(self):
        for batch in super().__iter__():
            tokens = torch.zeros(len(batch), 2000)
            tokens[:, 1000] = batch + (0.5 if getattr(self, "is_wrong", False) else 0)
            yield self.kind(tokens)


class Wrong(Padded):
    """Yields other values after it is resumed."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.is_wrong = True


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_batches_of_each_kind_are_compared_by_all_that_is_in_them(kind):
    def loader(cls):
        return lambda workers: type("Loader", (cls,), {"kind": staticmethod(kind)})(range(8), batch_size=4)

    check_resume(loader(Padded), workers=(0,), stops=1, epochs=1)
    with pytest.raises(AssertionError, match="does not resume exactly"):
        check_resume(loader(Wrong), workers=(0,), stops=1, epochs=2)


def test_other_kinds_of_batches_are_refused():
    def loader(collate):
        return lambda workers: PrefetchLoader(range(8), batch_size=4, collate_fn=collate)

    for collate, name in ((set, "set"), (lambda samples: {"x": [object()]}, "object"), (lambda samples: Texts, "type")):
        with pytest.raises(TypeError, match=f"^batch: expected tensors, .*, got {name}. Convert it in collate_fn"):
            check_resume(loader(collate), workers=(0,))


class Noisy(torch.utils.data.Dataset):
    def __init__(self, seed):
        self.random = np.random.RandomState(seed)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index, self.random.rand()])


def test_a_loader_without_a_seed_is_told_from_one_that_does_not_resume():
    check_resume(lambda workers: PrefetchLoader(Noisy(0), batch_size=4), workers=(0,))
    with pytest.raises(
        AssertionError, match=r"^Two runs without a stop differ already \(workers=\[0\]\).*seed what it b"
    ):
        check_resume(lambda workers: PrefetchLoader(Noisy(None), batch_size=4), workers=(0,))
    assert not report_resume(lambda workers: PrefetchLoader(Noisy(None), batch_size=4), stops=0, workers=0).reproducible


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"workers": ()}, TypeError, r"workers\): expected integers of 0 or more"),
    ({"ranks": (0,)}, TypeError, r"ranks\): expected integers of 1 or more"),
    ({"stops": -1}, ValueError, "stops: expected an integer of 0 or more"),
    ({"epochs": 0}, ValueError, "epochs: expected an integer of 1 or more"),
])  # fmt: skip
def test_impossible_values_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        check_resume(make(), **arguments)
    with pytest.raises(TypeError, match="make_loader: expected a loader with state_dict and load_state_dict, got"):
        check_resume(lambda workers: DataLoader(DATA, batch_size=4), workers=(0,))
