"""Random numbers belong to the sample: the same in every process that loads it, in every epoch and batch."""

import contextlib
import copy
import functools
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods, _set_sampler_epoch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo._random import shared_state
from lightning_turbo.data import PrefetchLoader, SeededSampler, seed_samples, tune_workers
from lightning_turbo.data.sample_seeds import seed_sample, seeds_of
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import Rows, seeded
from tests.integration.recording import Save, fit, gives

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")

SEED, LENGTH = 7, 12
GOLDEN = [3.0, 0.5156496, 0.6637135, 0.4652026, 0.4095555]


class Jitter:
    """Draws from a generator of its own that others may set, as MONAI's ``Randomizable``."""

    def __init__(self):
        self.R = np.random.RandomState()

    def set_random_state(self, seed=None):
        self.R.seed(seed)

    def __call__(self, values):
        return [*values, self.R.rand()]


class Augmented(Rows):
    """Draws from every generator that there is; a row is the index and what was drawn."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.steps = {"last": [Jitter()]}

    def __getitem__(self, index):
        row = self.steps["last"][0]([index, torch.rand(()).item(), random.random(), np.random.rand()])
        return torch.tensor(row, dtype=torch.float64)


class Bulk(Augmented):
    def __getitems__(self, indices):
        noise = torch.rand(())
        return [torch.tensor([float(index), noise]) for index in indices]


def refused(index):
    raise OSError("the disk is gone")


def collate(rows):
    """Stack, with a number that is drawn for the batch."""
    return torch.stack(rows), torch.rand(())


def rows_of(loader, epochs=2, joined=torch.cat):
    """What ``epochs`` passes load, ordered by epoch and index."""
    passes = [joined(list(loader)) for _ in range(epochs)]
    return torch.stack([rows[rows[:, 0].argsort()] for rows in passes])


@functools.cache
def expected(epochs=2):
    return rows_of(seed_samples(DataLoader(Augmented()), SEED), epochs)


def test_every_sample_of_every_epoch_has_numbers_of_its_own():
    drawn = expected()[:, :, 1:]
    assert drawn.unique().numel() == drawn.numel()
    # A run that is resumed after an upgrade goes on as it began: these are the numbers of earlier versions.
    assert expected(1)[0, 3].tolist() == pytest.approx(GOLDEN, abs=1e-7)
    for_torch, for_python, for_numpy = seeds_of(SEED, 0, 3)
    first = torch.rand((), generator=seeded(for_torch)).item(), random.Random(for_python).random()
    assert [*first, np.random.RandomState(for_numpy).rand()] == pytest.approx(GOLDEN[1:4], abs=1e-7)
    other = rows_of(seed_samples(DataLoader(Augmented()), SEED + 1))[:, :, 1:]
    assert not torch.isin(other, drawn).any()


def holding_itself():
    data = Augmented()
    data.steps["dataset"] = data
    return data


def joined_parts(data):
    return ConcatDataset([Subset(data, range(5)), Subset(data, range(5, LENGTH))])


LOADERS = {
    "batches": lambda: DataLoader(Augmented(), 5),
    "one worker": lambda: DataLoader(Augmented(), 4, num_workers=1, shuffle=True),
    "persistent workers": lambda: DataLoader(Augmented(), 3, shuffle=True, num_workers=2, persistent_workers=True),
    "batch sampler": lambda: DataLoader(Augmented(), batch_sampler=[[3, 2, 1], [0, 11, 10, 9], [4, 5, 6, 7, 8]]),
    "drop_last": lambda: DataLoader(Augmented(), batch_sampler=BatchSampler(RandomSampler(range(LENGTH)), 4, True)),
    "single samples": lambda: DataLoader(Augmented(), batch_size=None, sampler=torch.randperm(LENGTH)),
    "parts": lambda: DataLoader(joined_parts(Augmented()), 4),
    "a dataset that holds itself": lambda: DataLoader(holding_itself()),
    "seeded before": lambda: seed_samples(DataLoader(Augmented(), 3), SEED + 1),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_numbers_do_not_depend_on_how_samples_are_loaded(make):
    plain = make()
    before = dict(vars(plain))
    loader = seed_samples(plain, np.int64(SEED))
    assert isinstance(loader, type(plain))
    assert torch.equal(
        rows_of(loader, joined=torch.stack if plain.sampler is not None and plain.batch_sampler is None else torch.cat),
        expected(),
    )
    assert vars(plain) == before


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_class_that_loads_by_itself_is_refused():
    with pytest.raises(TypeError, match=r"got PrefetchStatefulDataLoader, whose class has an __iter__ of its own"):
        seed_samples(StatefulDataLoader(Augmented(), batch_size=3), SEED)


def replace_transform(loader):
    loader.dataset.steps["last"] = [Jitter()]
    return loader


@pytest.mark.parametrize(
    "change", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader)), replace_transform]
)
def test_a_loader_that_was_measured_and_is_changed_between_epochs_gives_the_same_numbers(change):
    loader = seed_samples(DataLoader(Augmented(), batch_size=3), SEED)
    tune_workers(lambda **settings: loader, seconds=0.2, max_workers=0, show=None)  # which counts no epoch
    first = rows_of(loader, 1)
    assert torch.equal(torch.cat([first, rows_of(change(loader), 1)]), expected())


def test_a_batch_loaded_in_one_call_follows_its_first_sample():
    def load(size, **settings):
        return rows_of(seed_samples(DataLoader(Bulk(), batch_size=size, **settings), SEED), 1)[0]

    assert torch.equal(load(4), load(4, num_workers=1))
    assert load(4)[:, 1].unique().numel() == 3
    assert torch.equal(load(4)[[0, 4, 8]], load(2)[[0, 4, 8]])


class BySample(Rows):
    """Loads a batch in one call, and seeds each sample; ``before`` is called once before the last one."""

    before = staticmethod(lambda: None)

    def __getitems__(self, indices):
        samples = []
        for index in indices:
            if index == indices[-1]:
                self.before()
            seed_sample(index)
            samples.append(torch.rand(()))
        return samples


def test_a_dataset_that_reads_another_seeded_loader_meanwhile_keeps_its_own_seeds():
    inner = seed_samples(DataLoader(BySample(LENGTH), batch_size=3), SEED + 1)
    outer = BySample(LENGTH)
    plain = torch.cat(list(seed_samples(DataLoader(outer, batch_size=3), SEED)))
    outer.before = lambda: list(inner)
    assert torch.equal(torch.cat(list(seed_samples(DataLoader(outer, batch_size=3), SEED))), plain)


def collate_one(row):
    return collate([row])


@pytest.mark.parametrize("batch_size", [4, None])
def test_what_collate_draws_follows_the_number_of_the_batch(batch_size):
    def draw(num_workers, sampler, epochs=2):
        function = collate if batch_size else collate_one
        settings = {"batch_size": batch_size, "num_workers": num_workers, "sampler": sampler, "collate_fn": function}
        loader = seed_samples(DataLoader(Augmented(), **settings), SEED)
        return torch.tensor([number for _ in range(epochs) for _, number in loader])

    numbers = draw(0, SequentialSampler(range(LENGTH)))
    assert numbers.unique().numel() == numbers.numel()
    assert torch.equal(numbers, draw(2, SequentialSampler(range(LENGTH))))
    assert torch.equal(numbers, draw(0, range(LENGTH)[::-1]))


def test_the_epoch_is_that_of_the_sampler_or_counted():
    sampler = DistributedSampler(range(LENGTH), num_replicas=1, rank=0, shuffle=False)
    loader = seed_samples(DataLoader(Augmented(), batch_size=5, sampler=sampler), SEED)
    for epoch in (1, 0):
        sampler.set_epoch(epoch)
        assert torch.equal(rows_of(loader, 1)[0], expected()[epoch])
    assert torch.equal(rows_of(seed_samples(DataLoader(Augmented(), batch_size=5), SEED), 3), expected(3))


@pytest.mark.parametrize("data", [Augmented(), Rows(LENGTH, refused)])
def test_the_generators_of_the_training_process_are_put_back(data):
    loader, plain = seed_samples(DataLoader(data, batch_size=5, collate_fn=collate), SEED), DataLoader(range(3))
    states = []
    for source in (loader, plain):  # each loader draws one number when it is asked for an iterator
        torch.manual_seed(0)
        try:
            next(iter(source))
        except OSError:
            assert source is loader
            assert not isinstance(data, Augmented)
        states.append(shared_state())
    first, second = states
    assert torch.equal(first.pop("torch"), second.pop("torch"))
    assert torch.equal(first["numpy"].pop(0), second["numpy"].pop(0))
    assert first == second


def make_for_lightning(kind):
    settings = {"batch_size": 5, "collate_fn": collate, "drop_last": True}
    if kind == "prefetch":
        return PrefetchLoader(Augmented(), sample_seeds=SEED, **settings)
    loader = seed_samples(DataLoader(Augmented(), **settings), SEED)
    return PrefetchLoader.of(loader) if kind == "of" else loader


@pytest.mark.filterwarnings("ignore:sample_seeds seeds")
@pytest.mark.parametrize("kind", ["plain", "prefetch", "of"])
@pytest.mark.parametrize("in_hook", [False, True])
def test_seeds_stay_when_lightning_replaces_the_sampler(kind, in_hook):
    """Lightning builds a loader again from its arguments, or from its attributes, with a sampler for the ranks."""
    with contextlib.ExitStack() as stack:
        if in_hook:
            stack.enter_context(_replace_dunder_methods(DataLoader, "dataset"))
            stack.enter_context(_replace_dunder_methods(BatchSampler))
        made = make_for_lightning(kind)
    loader = _update_dataloader(made, DistributedSampler(range(LENGTH), num_replicas=2, rank=1, shuffle=False))
    _set_sampler_epoch(loader, 1)
    (rows, _), *rest = loader
    assert not rest  # drop_last
    assert torch.equal(rows, expected()[1][1:11:2])
    predicting = _update_dataloader(made, SequentialSampler(range(LENGTH)), RunningStage.PREDICTING)
    assert torch.equal(torch.cat([rows for rows, _ in predicting]), expected()[0])
    assert predicting.batch_sampler.seen_batch_indices[-1] == [10, 11]


# ---- With prefetching.

QUIET = pytest.mark.filterwarnings("ignore:sample_seeds seeds")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 0}, None),
        ({"num_workers": 1, "threads": 3}, "threads=3 has no effect here: the generators that are seeded"),
        ({"num_workers": 2, "persistent_workers": True, "shuffle": True}, None),
        ({"num_workers": 1, "sampler": SeededSampler(range(LENGTH), SEED)}, None),
    ],
)
def test_prefetching_changes_no_number_and_says_what_it_cannot_do(settings, said):
    loader = PrefetchLoader(Augmented(), batch_size=2, sample_seeds=SEED, **settings)
    if isinstance(loader.sampler, SeededSampler):
        loader.sampler.set_epoch(0)
    with pytest.warns(NoEffectWarning, match=said) if said else contextlib.nullcontext():
        assert torch.equal(rows_of(loader, 1), expected(1))
    loader.close()


def run_on(loader, epochs):
    """The rows of these epochs, and the state before each batch."""
    rows, states = [], []
    for epoch in epochs:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        states.append((epoch, loader.state_dict()))
        for batch, drawn in loader:
            rows.append(torch.cat([batch, drawn.expand(len(batch), 1)], 1))
            states.append((epoch, loader.state_dict()))
        states.pop()
    loader.close()
    return rows, states


@QUIET
@pytest.mark.parametrize("order", [{"shuffle": True}, {"sampler": SeededSampler(range(LENGTH), SEED)}])
def test_a_run_with_augmentation_in_worker_processes_resumes_at_every_batch(order):
    def make(num_workers):
        settings = {"batch_size": 5, "collate_fn": collate, "num_workers": num_workers, **order}
        return PrefetchLoader(Augmented(), sample_seeds=SEED, generator=seeded(5), **settings)

    whole, states = run_on(make(1), range(3))
    assert len(states) == len(whole) == 9
    for number, (epoch, state) in list(enumerate(states))[::2]:
        torch.manual_seed(number)
        loader = make(number % 3)
        loader.load_state_dict(state)
        rows, _ = run_on(loader, range(epoch, epoch + 1))
        left = whole[number : 3 * (epoch + 1)]
        assert len(rows) == len(left)
        assert all(map(torch.equal, rows, left))


@QUIET
def test_a_run_resumes_after_an_epoch_with_another_number_of_ranks():
    def make(ranks, rank=0):
        sampler = SeededSampler(range(LENGTH), SEED, num_replicas=ranks, rank=rank)
        return PrefetchLoader(Augmented(), batch_size=2, sample_seeds=SEED, sampler=sampler)

    def load(loader, epoch):
        loader.sampler.set_epoch(epoch)
        return torch.cat(list(loader))

    first, second, begun, resumed = make(2), make(2, 1), make(1), make(1)
    dealt = torch.stack([load(first, 0), load(second, 0)], 1).flatten(0, 1)
    assert torch.equal(dealt, load(make(1), 0))
    begun.load_state_dict(first.state_dict())
    begun.sampler.set_epoch(1)
    rows = torch.cat(list(itertools.islice(begun, 3)))
    resumed.load_state_dict(begun.state_dict())
    assert torch.equal(rows_of([rows, load(resumed, 1)], 1)[0], expected()[1])


@QUIET
def to_train_and_to_note(rows):
    return torch.stack(rows)[:, 1:].float(), torch.stack(rows)


def fit_seeded(num_workers, *callbacks, **settings):
    """The batches of a fit."""
    loader = DataLoader(Augmented(), 5, shuffle=True, num_workers=num_workers, collate_fn=to_train_and_to_note)
    model = fit(gives(loader, sample_seeds=SEED), *callbacks, **settings)
    return [torch.tensor(rows, dtype=torch.float64) for rows in model.seen]


@QUIET
@pytest.mark.filterwarnings("ignore:.*have no .val_dataloader")
@pytest.mark.filterwarnings("ignore:Consider setting .persistent_workers=True")  # said where workers are spawned
@pytest.mark.parametrize("reload", [0, 1])
def test_a_fit_resumes_at_each_step_with_other_workers_and_is_the_same_run(reload):
    settings = {"reload_dataloaders_every_n_epochs": reload}
    steps = (1, 3, 5)
    whole = fit_seeded(1, *(Save(f"{step}.ckpt", step) for step in steps), **settings)
    rows = torch.cat(whole)
    assert torch.equal(rows_of([rows[:LENGTH]], 1)[0], expected()[0])
    assert torch.equal(rows_of([rows[LENGTH:]], 1)[0], expected()[1])
    for step in steps:
        left = fit_seeded(step // 2, ckpt_path=f"{step}.ckpt", **settings)
        assert len(left) == 6 - step
        drawn, epoch = torch.cat(left)[-LENGTH if step <= 3 else 0 :], expected()[1]
        assert torch.equal(drawn, epoch[drawn[:, 0].long()])
        assert step % 3 == 0 or all(map(torch.equal, left[: 3 - step % 3], whole[step:]))


class Albumentations:
    """Has both methods as the transforms of Albumentations 2: generators for one, a seed for the other."""

    def __init__(self):
        self.set_random_seed(None)

    def set_random_state(self, random_generator, py_random):
        self.numbers, self.python = random_generator, py_random

    def set_random_seed(self, seed):
        self.set_random_state(np.random.default_rng(seed), random.Random(seed))

    def __call__(self, values):
        return [*values, self.numbers.random(), self.python.random()]


class TakesNoSeed(Jitter):
    def set_random_state(self, state):
        raise AssertionError("is not reached")


def augmented_by(transform):
    dataset = Augmented()
    dataset.steps["last"] = [transform]
    return dataset


class OwnGenerators:
    """Has no method that seeds it."""

    def __init__(self):
        self.held = {"torch": torch.Generator(), "numpy": [np.random.default_rng(), np.random.RandomState()]}
        self.python = random.Random()

    def __call__(self, values):
        new, old = self.held["numpy"]
        return [
            *values,
            torch.rand((), generator=self.held["torch"]).item(),
            new.random(),
            old.rand(),
            self.python.random(),
        ]


class Paired:
    """Gives its two parts the same seed, so that an image and its mask get the same augmentation."""

    def __init__(self):
        self.parts = [Jitter(), Jitter()]

    def set_random_state(self, seed):
        for part in self.parts:
            part.set_random_state(seed)

    def __call__(self, values):
        first, second = (part([])[0] for part in self.parts)
        assert first == second
        return [*values, first]


@pytest.mark.parametrize("kind", [Albumentations, Jitter, OwnGenerators, Paired])
def test_what_the_dataset_and_its_transforms_hold_is_seeded(kind):
    # torch cannot hand a torch.Generator to a process that is not forked.
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    one, two = (
        seed_samples(DataLoader(joined_parts(augmented_by(kind())), size, **workers), SEED)
        for size, workers in ((4, {}), (3, forked))
    )
    rows = torch.cat(list(one))
    assert torch.equal(rows, torch.cat(list(two)))
    assert rows.unique().numel() == rows.numel()


def test_a_transform_that_takes_no_seed_is_named():
    loader = seed_samples(DataLoader(augmented_by(TakesNoSeed()), 4), SEED)
    with pytest.raises(TypeError, match=r"sample seeds: expected TakesNoSeed to have set_random_state\(seed=\)"):
        next(iter(loader))


class Records(Rows):
    """Has a method and attributes that a worker_init_fn and callbacks reach through the loader."""

    level = 0

    def reopen(self):
        self.level = 100

    def __getitem__(self, index):
        return torch.tensor(index + self.level)


def reopen(worker):
    assert not hasattr(torch.utils.data.get_worker_info().dataset, "absent")
    torch.utils.data.get_worker_info().dataset.reopen()


def raise_level(worker):
    torch.utils.data.get_worker_info().dataset.level += 70


@pytest.mark.parametrize(
    ("init", "start", "added"),
    [
        (None, None, 5),
        (reopen, "fork", 100),
        (raise_level, "fork", 75),
        pytest.param(raise_level, "forkserver", 75, marks=pytest.mark.slow),
    ],
)
def test_the_dataset_is_reached_through_the_seeded_one(init, start, added):
    """To read, to call and to set, in this process and in a worker."""
    inside = {"num_workers": 1, "worker_init_fn": init, "multiprocessing_context": start} if init else {}
    loader = seed_samples(DataLoader(Records(4), batch_size=4, **inside), SEED)
    loader.dataset.level = 5
    assert torch.cat(list(loader)).tolist() == [index + added for index in range(4)]
    del loader.dataset.level
    assert loader.dataset.level == 0
    loader.dataset.reopen()
    assert loader.dataset.level == 100
    part = seed_samples(DataLoader(Subset(loader.dataset, [3, 1])), SEED).dataset
    assert copy.deepcopy(part).indices == [3, 1]
    assert not hasattr(part, "level")
