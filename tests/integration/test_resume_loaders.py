"""A run resumed from a checkpoint sees the same batches as an uninterrupted one."""

import functools
import multiprocessing
import random
import shutil

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_turbo import ExactResume, PrefetchDataModule, PrefetchLoader, SeededSampler
from lightning_turbo.data.loading.loader import prefetching
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Rows, Stream, seeded
from tests.integration.recording import EACH_STRATEGY, Numbers, Save, fit, gives, matrix
from tests.tables import every_pair
from tests.trainers import quiet_trainer
from tests.versions import BEGINS_ONCE, unpickling

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.timeout(120),
    # torchdata calls a deprecated function of torch.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    # Lightning stops reading a shorter stream where the longest ends, perhaps before its thread has
    # seen its end.
    pytest.mark.filterwarnings("ignore:An epoch of the stream:lightning_turbo.errors.TurboWarning"),
]
NO_VALIDATION = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
STRATEGIES = ["auto", "turbo"]


def loader(length, seed, cls=DataLoader, **settings):
    return cls(range(length), 2, shuffle=True, generator=torch.Generator().manual_seed(seed), **settings)


def sides(strategy, cls=DataLoader):
    """Return a DataModule that adds prefetching and a loader class, or a plain DataModule and a prefetching class."""
    return (PrefetchDataModule, cls) if strategy == "auto" else (LightningDataModule, prefetching(cls))


class Own(IterableDataset):
    """A stateful stream that draws from its own generator."""

    def __init__(self, length=8):
        self.length, self.at, self.loaded, self.rng = length, 0, False, torch.Generator().manual_seed(3)

    def __iter__(self):
        self.at, self.loaded = self.at if self.loaded else 0, False
        while self.at < self.length:
            self.at += 1
            yield self.sample()

    def sample(self):
        return torch.randint(1000, (), generator=self.rng)

    def state_dict(self):
        return {"at": self.at, "rng": self.rng.get_state()}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True
        self.rng.set_state(state["rng"])


LOADERS = {
    "shuffled": lambda cls: loader(8, 1, cls),
    "workers": lambda cls: loader(8, 1, cls, num_workers=1),
    "counting": lambda cls: cls(range(8), 2, sampler=DistributedSampler(range(8), 1, 0), num_workers=1),
    "distributed": lambda cls: cls(range(16), 2, sampler=DistributedSampler(range(16), 2, 1), num_workers=1),
    "two": lambda cls: CombinedLoader({"a": loader(8, 1, cls), "b": loader(4, 2, cls)}, "max_size_cycle"),
    "unequal": lambda cls: CombinedLoader({"a": loader(8, 1, cls), "b": loader(4, 2, cls)}, "max_size"),
    "unequal streams": lambda cls: CombinedLoader({"a": cls(Stream(8), 2), "b": cls(Stream(8), 4)}, "max_size"),
    "stream": lambda cls: cls(Stream(8), 2),
    "stream of a worker": lambda cls: cls(Stream(8), 2, num_workers=1),
    "own": lambda cls: cls(Own(), 2),
    "own of workers": lambda cls: cls(Own(4), 2, num_workers=2),
}


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"a": batch}
        self.seen.append({name: None if part is None else part.tolist() for name, part in parts.items()})
        return self.weight.square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawing(Model):
    """Its weight depends on random numbers of each step. At the end it records the weight and Lightning's counters."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        drawn = torch.rand(()) + random.random() + np.random.rand()
        return (self.weight - drawn).square()

    def on_train_end(self):
        counters = {**self.trainer.fit_loop.state_dict(), "state_dict": {}}
        self.seen.append((self.weight.item(), self.trainer.global_step, counters))


def run(make, base, path, *callbacks, model=Model, **settings):
    made = []

    class Data(base):
        def train_dataloader(self):
            made.append(make())
            return made[-1]

    seed_everything(0 if path is None else 1, verbose=False)
    model = model()
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 3, **settings})
    trainer.fit(model, datamodule=Data(), ckpt_path=path, **unpickling(True if path else None))
    assert len(made) == 1
    return model.seen


def check_stops(make, base, stops, folder, straight=None, **settings):
    """Check that a run stopped at these batches and hooks sees the same batches as an uninterrupted one."""
    straight = straight or run(make, base, None, **settings)
    seen, path = [], None
    for number, (batches, hook) in enumerate(stops):
        began, there = len(seen), folder / str(number)
        seen += run(make, base, path, Save(there, batches, hook), **settings)[: batches - began]
        path = there
    assert seen + run(make, base, path, **settings) == straight


def check(make, base, path, batches, hook="on_train_batch_end", callbacks=(), **settings):
    straight = run(make, base, None, *(kind() for kind in callbacks), Save(path, batches, hook), **settings)
    assert run(make, base, path, *(kind() for kind in callbacks), **settings) == straight[batches:]
    return straight


@matrix(("mode", "batches", "strategy"), ["max_size", "max_size_cycle", "min_size"], [1, 2, 3, 4, 5], STRATEGIES)
def test_loaders_of_unequal_length(mode, batches, strategy, tmp_path):
    def make():
        return CombinedLoader({"a": loader(8, 1), "b": loader(4, 2)}, mode)

    seen = check(make, PrefetchDataModule, tmp_path / "c", batches, strategy=strategy)
    assert [batch["b"] is None for batch in seen[:4]] == [False, False, *[mode == "max_size"] * 2]


@pytest.mark.parametrize("limit", [1.0, 3])
@pytest.mark.parametrize("hook", ["on_train_batch_end", pytest.param("on_train_epoch_end", marks=BEGINS_ONCE)])
def test_an_order_from_a_generator_resumes_after_an_epoch(limit, hook, tmp_path):
    batches = 2 * (limit if limit == 3 else 4)
    seen = check(
        lambda: loader(8, 1), PrefetchDataModule, tmp_path / "c", batches, hook,
        strategy="turbo", limit_train_batches=limit,
    )  # fmt: skip
    third = seen[batches:]
    assert third not in (seen[: len(third)], seen[len(third) : 2 * len(third)])


def early(hook):
    """Return a model that makes Lightning set up the loaders before it restores the loops."""

    def reads(self, *args, **kwargs):
        assert self.trainer.estimated_stepping_batches == 12
        return getattr(Model, hook)(self, *args, **kwargs)

    return type("Early", (Model,), {hook: reads})


@matrix(
    ("kind", "batches", "hook", "strategy"), ["plain", "workers"], [2, 4, 6],
    ["configure_optimizers", "on_fit_start", "setup"], STRATEGIES,
)  # fmt: skip
def test_loaders_set_up_before_the_loops_are_restored_resume(kind, batches, hook, strategy, tmp_path):
    base, cls = sides(strategy) if kind == "workers" else (PrefetchDataModule, DataLoader)
    check(
        lambda: loader(8, 1, cls, num_workers=int(kind == "workers")), base, tmp_path / "c", batches,
        strategy=strategy, model=early(hook),
    )  # fmt: skip


def test_a_sampler_with_set_epoch_resumes_if_its_loader_is_set_up_early(tmp_path):
    make, model = (lambda: LOADERS["counting"](DataLoader)), early("configure_optimizers")
    check(make, LightningDataModule, tmp_path / "c", 4, strategy="turbo", model=model)


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 12}])
@pytest.mark.parametrize("batches", [2, pytest.param(4, marks=BEGINS_ONCE)])
def test_a_stateful_loader_resumes_if_it_is_set_up_early(batches, limit, tmp_path):
    class SetsUp(Model):
        def configure_optimizers(self):
            self.trainer.fit_loop.setup_data()
            return super().configure_optimizers()

    check(
        lambda: loader(8, 1, PrefetchLoader), LightningDataModule, tmp_path / "c", batches,
        "on_train_batch_end" if batches == 2 else "on_train_epoch_end", strategy="turbo", model=SetsUp, **limit,
    )  # fmt: skip


@BEGINS_ONCE
@EACH_STRATEGY
def test_an_epoch_that_a_hook_ended_is_not_resumed(strategy, tmp_path):
    class Ends(Model):
        def on_train_batch_start(self, batch, index):
            return -1 if index == 2 else None

    base, cls = sides(strategy)
    save = Save(tmp_path / "c", 3, "on_train_epoch_end")  # Lightning counts the skipped batch
    seen, again = (
        run(lambda: loader(8, 1, cls), base, path, save, strategy=strategy, model=Ends)
        for path in (None, tmp_path / "c")
    )
    assert again == seen[2:]
    assert len(seen) == 6


STOPS = [
    [(1, "on_train_batch_end")],
    [(0, "on_train_batch_start"), (3, "on_train_batch_start")],
    [(4, "on_train_batch_start"), (6, "on_train_batch_end")],
    [(5, "on_after_backward"), (6, "on_train_batch_start")],
    [(4, "on_train_batch_end"), (4, "on_train_batch_start"), (5, "on_before_backward")],
    pytest.param([(4, "on_train_epoch_end"), (8, "on_train_epoch_start")], marks=BEGINS_ONCE, id="epochs"),
    pytest.param([(4, "on_train_epoch_end"), (4, "on_train_start")], marks=BEGINS_ONCE, id="epoch and start"),
]


@functools.cache
def never_stopped(name, strategy, model):
    base, cls = sides(strategy)
    return run(lambda: LOADERS[name](cls), base, None, strategy=strategy, model=model)


@pytest.mark.filterwarnings("ignore:Own has a state_dict, which its worker processes are not asked for")
@matrix(("name", "stops", "strategy"), list(LOADERS), STOPS, STRATEGIES, times=1)
def test_a_run_stopped_repeatedly_equals_an_uninterrupted_one(name, stops, strategy, tmp_path):
    base, cls = sides(strategy)
    # A step that had drawn random numbers before the save draws others when it is repeated.
    model = Model if any("backward" in hook for _, hook in stops) else Drawing
    straight = never_stopped(name, strategy, model)
    check_stops(lambda: LOADERS[name](cls), base, stops, tmp_path, straight, strategy=strategy, model=model)


@BEGINS_ONCE
@pytest.mark.parametrize(("name", "stops", "settings"), [
    ("shuffled", [(4, "on_train_epoch_end")], {"max_epochs": -1, "max_steps": 11}),
    ("workers", [(4, "on_before_backward"), (8, "on_train_epoch_end")], {"max_epochs": -1, "max_steps": 11}),
    ("stream", [(8, "on_train_end")], {"max_epochs": 2}),
])  # fmt: skip
def test_runs_with_other_stopping_conditions_resume(name, stops, settings, tmp_path):
    """With ``max_steps`` only, with epochs that end before or after their data, or with no step left."""
    for strategy in STRATEGIES:
        base, cls = sides(strategy)
        check_stops(lambda cls=cls: LOADERS[name](cls), base, stops, tmp_path, strategy=strategy, **settings)


@pytest.mark.filterwarnings("ignore:Prefetching has no effect on a list")
@every_pair(
    ("hook", "interval", "workers", "strategy"), ["on_train_epoch_end", "on_train_end"], [4, 2], [0, 1], STRATEGIES
)
def test_an_epoch_ended_by_max_steps_resumes_with_a_larger_max_steps(hook, interval, workers, strategy, tmp_path):
    """Ten steps end in the third epoch of four batches, right after a validation if its interval is two."""

    class Logged(Model):
        def training_step(self, batch, batch_idx):
            self.log("made", float(self.global_step))
            self.seen.append((self.current_epoch, self.trainer.train_dataloader.sampler.epoch, batch.tolist()))
            return self.weight.square()

        def validation_step(self, batch, batch_idx):
            self.seen.append(("validated", self.global_step))

    class Rows(DummyLogger):
        def log_metrics(self, metrics, step):
            rows.append((step, metrics["made"], metrics["epoch"]))

    def make():
        return cls(range(8), 2, sampler=SeededSampler(range(8), seed=1), num_workers=workers)

    def go(steps, path=None, *callbacks):
        return run(
            make, base, path, *callbacks, model=Logged, logger=Rows(), strategy=strategy, max_epochs=-1,
            max_steps=steps, log_every_n_steps=1, num_sanity_val_steps=0, val_check_interval=interval,
        )  # fmt: skip

    rows, path = [], tmp_path / "c"
    base, cls = sides(strategy)
    base = type("Validated", (base,), {"val_dataloader": lambda _: [0]})
    straight, logged = go(15), rows.copy()
    rows.clear()
    assert go(10, None, Save(path, 10, hook)) + go(15, path) == straight
    assert rows == logged


def test_a_checkpoint_after_a_run_starts_no_worker(tmp_path):
    """A ``StatefulDataLoader`` starts workers for its ``state_dict`` after its iterator was deleted."""

    def make():
        return LOADERS["stream of a worker"](StatefulDataLoader)

    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(Model(), datamodule=gives(make()))
    trainer.save_checkpoint(tmp_path / "c")
    assert not multiprocessing.active_children()
    seen = run(make, PrefetchDataModule, tmp_path / "c", max_epochs=3)
    assert seen == [{"a": [2 * number, 2 * number + 1]} for number in range(4)]


@EACH_STRATEGY
def test_a_loader_whose_attributes_are_kept_leaves_no_worker(strategy, tmp_path):
    """Lightning keeps the patched attributes for the rest of a process in which a ``train_dataloader`` raised."""
    with _replace_dunder_methods(DataLoader):
        test_a_run_stopped_repeatedly_equals_an_uninterrupted_one(
            "workers", [(4, "on_train_batch_end")], strategy, tmp_path
        )
        assert not multiprocessing.active_children()


class SaveAfterBatch(Callback):
    """Saves a checkpoint after a batch and its validation, as a strategy of several ranks does for Slurm."""

    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_start(self, trainer, module):
        loop = trainer.fit_loop.epoch_loop
        end = loop.on_advance_end

        def on_advance_end(fetcher):
            end(fetcher)
            if loop.batch_progress.total.processed == self.batches:
                trainer.save_checkpoint(self.path)

        loop.on_advance_end = on_advance_end


@pytest.mark.filterwarnings("ignore:Prefetching has no effect on a list")
@EACH_STRATEGY
@pytest.mark.parametrize(("batches", "hook"), [
    (2, "on_train_batch_start"), (2, "on_before_backward"), (4, "on_train_epoch_start"), (8, "on_train_epoch_start"),
    (8, "on_before_backward"), (2, "behind"), (3, "behind"), (4, "behind"), (6, "behind"), (8, "behind"),
])  # fmt: skip
def test_step_counts_and_validations_of_a_resumed_run_equal_an_uninterrupted_one(batches, hook, strategy, tmp_path):
    class Logged(Model):
        def training_step(self, batch, batch_idx):
            self.log("made", float(self.global_step))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.seen.append(("validated", self.global_step))

    class Rows(DummyLogger):
        def log_metrics(self, metrics, step):
            rows.append((step, metrics.get("made"), metrics["epoch"]))

    base, cls = sides(strategy)
    base = type("Validated", (base,), {"val_dataloader": lambda _: [0]})

    def go(path, *callbacks):
        rows.clear()
        seen = run(
            lambda: loader(8, 1, cls), base, path, *callbacks, model=Logged, logger=Rows(), strategy=strategy,
            log_every_n_steps=1, num_sanity_val_steps=0, val_check_interval=3, check_val_every_n_epoch=None,
        )  # fmt: skip
        return seen, list(rows)

    rows = []
    path = tmp_path / "c"
    seen, logged = go(None, SaveAfterBatch(path, batches) if hook == "behind" else Save(path, batches, hook))
    again, logged_again = go(path)
    assert again == seen[-len(again) :]
    assert len([step for step in again if isinstance(step, dict)]) == 12 - batches
    assert logged_again == logged[batches:]


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_takes_dataloader_iter_resumes_after_its_batches(tmp_path):
    class Takes(Model):
        def training_step(self, dataloader_iter):
            for _ in range(2):
                batch, *_ = next(dataloader_iter)
                self.seen.append(batch.tolist())
            return self.weight.square()

    path, seen = tmp_path / "c", []
    for ckpt in (None, path):
        saves = [] if ckpt else [Save(path, 3, "on_train_batch_end")]
        seen.append(run(lambda: loader(16, 1), PrefetchDataModule, ckpt, *saves, model=Takes, max_epochs=1))
    assert seen[1] == seen[0][6:]


class Augmented(IterableDataset):
    """A stream that draws from the global RNG, from which the model draws too."""

    def __iter__(self):
        return ((torch.randn(4), number) for number in range(12))


class AugmentedWithLength(Augmented):
    def __len__(self):
        return 12


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@NO_VALIDATION
@pytest.mark.parametrize("batches", [1, 3, 6, 8])
@pytest.mark.parametrize("stream", [Augmented, AugmentedWithLength])
def test_an_iterable_dataset_that_draws_random_numbers_resumes_exactly(stream, batches, tmp_path):
    whole = fit(gives(DataLoader(stream(), 2)), Save(tmp_path / "a.ckpt", batches))
    rest = fit(gives(DataLoader(stream(), 2)), seed=1, ckpt_path=tmp_path / "a.ckpt")
    assert (rest.seen, rest.losses) == (whole.seen[batches:], whole.losses[batches:])


class DrawingRows(Rows):
    """Adds a random number of its own generator."""

    def __init__(self):
        super().__init__(8)
        self.rng = seeded(3)

    def __getitem__(self, index):
        return 1000 * index + int(torch.randint(1000, (), generator=self.rng))


class Shuffles(Sampler):
    """Draws from a NumPy generator."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(self.rng.permutation(8).tolist())


# Loaders that do not report their position to ExactResume.
FOREIGN = {
    "plain": lambda: loader(8, 1),
    "plain, workers": lambda: loader(8, 1, num_workers=1),
    "plain, persistent workers": lambda: loader(8, 1, num_workers=1, persistent_workers=True),
    "plain, replacement": lambda: DataLoader(
        range(8), 2, sampler=RandomSampler(range(8), replacement=True, num_samples=10, generator=seeded(1))
    ),
    "plain, NumPy": lambda: DataLoader(range(8), 2, sampler=Shuffles()),
    "torchdata": lambda: StatefulDataLoader(range(8), 2, shuffle=True),
    "torchdata, generator": lambda: loader(8, 1, StatefulDataLoader),
    "torchdata, replacement": lambda: StatefulDataLoader(
        range(8), 2, sampler=RandomSampler(range(8), replacement=True, num_samples=10, generator=seeded(1))
    ),
    "torchdata, NumPy": lambda: StatefulDataLoader(range(8), 2, sampler=Shuffles()),
    "torchdata, workers": lambda: StatefulDataLoader(range(8), 2, shuffle=True, num_workers=1),
    "torchdata, persistent workers": lambda: StatefulDataLoader(
        range(8), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "torchdata, distributed": lambda: StatefulDataLoader(
        range(16), 2, sampler=StatefulDistributedSampler(range(16), 2, 1)
    ),
    "plain, dataset": lambda: DataLoader(DrawingRows(), 2, shuffle=True),
    "torchdata, dataset": lambda: StatefulDataLoader(DrawingRows(), 2, shuffle=True),
    "torchdata, stream": lambda: StatefulDataLoader(Own(), 2),
    "torchdata, stream of a worker": lambda: StatefulDataLoader(Own(), 2, num_workers=1),
    "torchdata, two": lambda: CombinedLoader(
        {"a": StatefulDataLoader(range(8), 2, shuffle=True), "b": loader(6, 2)}, "max_size_cycle"
    ),
}


# Worker processes that stay are seeded in the stopped run alone, which a loader of another class does not know, nor one
# over torchdata's, which draws by itself.
OVER = [name for name in FOREIGN if name != "torchdata, persistent workers"]
ALONE = [name for name in FOREIGN if "persistent" not in name]
HOOKS = ["on_train_batch_end", "on_train_epoch_end"]


@BEGINS_ONCE
@matrix(("name", "limit", "hook"), ALONE, [1.0, 3], HOOKS)
def test_loaders_of_other_classes_start_the_next_epoch_as_in_an_uninterrupted_run(name, limit, hook, tmp_path):
    check_next_epoch(name, limit, hook, LightningDataModule, tmp_path)


@BEGINS_ONCE
@matrix(("name", "limit", "hook"), OVER, [1.0, 3], HOOKS)
def test_loaders_with_prefetch_start_the_next_epoch_as_in_an_uninterrupted_run(name, limit, hook, tmp_path):
    check_next_epoch(name, limit, hook, PrefetchDataModule, tmp_path)


@BEGINS_ONCE
@pytest.mark.parametrize("base", [LightningDataModule, PrefetchDataModule])
@pytest.mark.parametrize("name", [
    "plain", "plain, workers", "plain, NumPy", "torchdata", "torchdata, generator", "plain, dataset",
])  # fmt: skip
def test_an_epoch_at_whose_start_a_run_stopped_several_times_begins_as_in_an_uninterrupted_one(name, base, tmp_path):
    """A run that goes on there has called iter() before its hook, and the next one calls it again."""
    make = FOREIGN[name]
    straight, path = run(make, base, None, ExactResume()), None
    for there in (tmp_path / "first", tmp_path / "second", tmp_path / "third"):
        run(make, base, path, ExactResume(), Save(there, 4, "on_train_epoch_start"))
        path = there
    assert run(make, base, path, ExactResume()) == straight[4:]


def check_next_epoch(name, limit, hook, base, tmp_path):
    length = 3 if limit == 3 else 5 if "replacement" in name else 4
    seen = check(FOREIGN[name], base, tmp_path / "c", 2 * length, hook, (ExactResume,), limit_train_batches=limit)
    assert len(seen) == 3 * length


class Placed(Own):
    """A stateful stream that draws no random numbers."""

    def sample(self):
        return torch.tensor(self.at)


# One of three loaders; its passes are shorter than the epoch of the longest one.
PASSES = {
    "shuffled": lambda cls, length: loader(length, length, cls),
    "shuffled by the global generator": lambda cls, length: cls(range(length), 2, shuffle=True),
    "workers": lambda cls, length: loader(length, length, cls, num_workers=1),
    "persistent workers": lambda cls, length: loader(length, length, cls, num_workers=1, persistent_workers=True),
    "with an epoch": lambda cls, length: cls(range(length), 2, sampler=SeededSampler(range(length), 3)),
    "stream": lambda cls, length: cls(Stream(length), 2),
    "own": lambda cls, length: cls(Own(length), 2),
    "torchdata": lambda cls, length: prefetching(StatefulDataLoader)(range(length), 2, shuffle=True),
    "torchdata, stream": lambda cls, length: prefetching(StatefulDataLoader)(Placed(length), 2),
}


@matrix(
    ("name", "stops"), list(PASSES),
    [[(4, "on_train_batch_end")], [(5, "on_train_batch_end"), (9, "on_train_batch_end")], [(4, "on_train_batch_start")],
     [(4, "on_train_batch_end"), (5, "on_train_batch_end"), (8, "on_train_batch_end")]],
    times=1,
)  # fmt: skip
def test_loaders_that_restarted_within_an_epoch_resume(name, stops, tmp_path):
    check_stops(lambda: three(name), LightningDataModule, stops, tmp_path, strategy="turbo")


def three(name):
    made = {str(length): PASSES[name](PrefetchLoader, length) for length in (10, 6, 4)}
    return CombinedLoader(made, "max_size_cycle")


@pytest.mark.parametrize("name", ["stream", "torchdata, stream"])
def test_a_warning_names_the_batches_that_are_lost_when_a_pass_ended_within_a_step(name, tmp_path):
    """Two batches were fetched and not used, that of the step and the next one, and a pass ended between them."""
    save = Save(tmp_path / "c", 3, "on_train_batch_start")

    def stop_and_go_on():
        for path in (None, tmp_path / "c"):
            run(lambda: three(name), LightningDataModule, path, save, strategy="turbo", max_epochs=1)

    with pytest.warns(TurboWarning, match="the last 1 of its pass before are left out"):
        stop_and_go_on()


# Checkpoints of a validation, and reloaded dataloaders.


def test_the_best_checkpoint_of_a_validation_resumes_with_the_next_epoch(tmp_path):
    class Data(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(8), 2, shuffle=True, generator=torch.Generator().manual_seed(0))

        def val_dataloader(self):
            return DataLoader(Numbers(4), 2)

    def run(folder, path=None):
        best = ModelCheckpoint(folder, monitor="val", save_top_k=-1, filename="{step}")
        settings = {"max_epochs": 3, "val_check_interval": 0.5, "enable_checkpointing": True}
        return fit(Data(), best, ckpt_path=path, **settings)

    whole = run(tmp_path / "runs")
    path = (tmp_path / "runs" / "step=4.ckpt").rename(tmp_path / "epoch.ckpt")
    shutil.rmtree(tmp_path / "runs")
    assert run(tmp_path / "runs", path).seen == whole.seen[4:]


@NO_VALIDATION
@pytest.mark.parametrize("every", [1, 2])
@EACH_STRATEGY
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_reloaded_dataloaders_reset_epochs(every, hook, strategy, tmp_path):
    class Anew(PrefetchDataModule):
        def train_dataloader(self):
            own = torch.Generator().manual_seed(0)
            return DataLoader(Numbers(8), 2, sampler=RandomSampler(range(8), generator=own))

    path = tmp_path / "one.ckpt"
    settings = {"max_epochs": 3, "strategy": strategy, "reload_dataloaders_every_n_epochs": every}
    whole = fit(Anew(), Save(path, 4, hook), **settings)
    rest = fit(Anew(), ckpt_path=path, **settings)
    assert rest.seen[:4] == whole.seen[4:8]
    assert (whole.seen[:4] == whole.seen[4:8]) == (every == 1)


@NO_VALIDATION
@pytest.mark.parametrize(("batches", "hook", "workers", "every", "strategy"), [
    pytest.param(*stop, *way, marks=[pytest.mark.slow] * (way[0] and stop[0] != 6))
    for stop in (
        (4, "on_train_batch_end"), (4, "on_train_epoch_end"), (6, "on_train_batch_end"), (8, "on_train_epoch_end"),
    )
    for way in ((0, 1, "auto"), (1, 1, "turbo"), (0, 2, "turbo"))
])  # fmt: skip
def test_reloaded_dataloaders_that_share_a_generator_resume_exactly(batches, hook, workers, every, strategy, tmp_path):
    class Keeps(PrefetchDataModule):
        def __init__(self):
            super().__init__()
            self.own = torch.Generator().manual_seed(0)

        def train_dataloader(self):
            return DataLoader(Numbers(8), 2, shuffle=True, generator=self.own, num_workers=workers)

    path = tmp_path / "one.ckpt"
    settings = {"max_epochs": 4, "strategy": strategy, "reload_dataloaders_every_n_epochs": every}
    whole = fit(Keeps(), Save(path, batches, hook), **settings)
    assert fit(Keeps(), ckpt_path=path, **settings).seen == whole.seen[batches:]


class OwnRows(Own):
    def sample(self):
        return torch.randn(4, generator=self.rng), self.at


@NO_VALIDATION
def test_reloaded_streams_that_draw_resume_at_the_start_of_an_epoch(tmp_path):
    """Lightning fetches a batch of the stream before the hook, and begins the stream again after it."""

    class Anew(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(OwnRows(), 2)

    path = tmp_path / "one.ckpt"
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    whole = fit(Anew(), Save(path, 4, "on_train_epoch_start"), **settings)
    rest = fit(Anew(), ckpt_path=path, **settings)
    assert (rest.seen, rest.losses) == (whole.seen[4:], whole.losses[4:])


@pytest.mark.parametrize(("epoch", "validates"), [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)])
def test_validation_dataloaders_are_reloaded_in_the_same_epochs(epoch, validates, tmp_path):
    class Anew(PrefetchDataModule):
        def __init__(self):
            super().__init__()
            self.asked = []

        def train_dataloader(self):
            return DataLoader(Numbers(4), 2)

        def val_dataloader(self):
            self.asked.append(self.trainer.current_epoch)
            return DataLoader(Numbers(4), 2)

    path, asked = tmp_path / "c", []
    for ckpt in (None, path):
        data = Anew()
        saves = [] if ckpt else [Save(path, 2 * epoch, "on_train_epoch_end")]
        fit(
            data, *saves, ckpt_path=ckpt, strategy="turbo", max_epochs=8, reload_dataloaders_every_n_epochs=2,
            check_val_every_n_epoch=validates, num_sanity_val_steps=0,
        )  # fmt: skip
        asked.append([each for each in data.asked if each > epoch])
    assert asked[0] == asked[1] != []
