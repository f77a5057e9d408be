"""A resumed run repeats an interrupted validation or runs one that was due, and the rest of the run is equal."""

import os
import signal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_turbo import ExactResume, Prefetch, PrefetchLoader
from tests.data.samples import seeded
from tests.integration.recording import Save, matrix
from tests.tables import every_pair
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
    pytest.mark.filterwarnings("ignore:Loading a batch draws:lightning_turbo.errors.NoEffectWarning"),
    pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning 2.6 finishes an interrupted validation"),
]
BATCHES = 4


class Stop(Exception):
    """Ends a run."""


class SaveOnException(pl.Callback):
    """Saves like Lightning's ``OnExceptionCheckpoint``, from which a plain run would resume automatically."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


class Rows(Dataset):
    """Eight samples, one of which may fail to load. The dataset may draw random numbers, or use its own generator."""

    def __init__(self, broken=None, rng=None, noise=False):
        self.broken, self.rng, self.noise = broken, rng, noise

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        if index == self.broken:
            raise Stop
        own = 0.0 if self.rng is None else self.rng.random()
        return torch.full((4,), float(index)) + own + (torch.rand(4) if self.noise else 0)


class Net(pl.LightningModule):
    """Fails in one hook of one validation, or sends a signal to its process there."""

    def __init__(self, fails="", at=0, validation=0, how=Stop):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
        self.fails, self.at, self.validation, self.how = fails, at, validation, how
        self.trained, self.validated, self.metrics = [], [], []
        self.begun = -1

    def fail(self, where, index=None):
        if self.fails == where and self.at in (index, None) and self.begun == self.validation:
            if self.how is Stop:
                raise Stop
            os.kill(os.getpid(), self.how)

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.trained.append((self.current_epoch, index, batch[:, 0].tolist(), loss.item()))
        return loss

    def on_validation_start(self):
        self.begun += not self.trainer.sanity_checking

    def validation_step(self, batch, index, dataloader_idx=0):
        self.fail("validation_step", index)
        self.log("mean", batch.mean() + torch.rand(()), batch_size=len(batch))
        if not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, dataloader_idx, index, batch[:, 0].tolist()))

    def on_validation_batch_end(self, outputs, batch, index, dataloader_idx=0):
        self.fail("on_validation_batch_end", index)

    def on_validation_epoch_end(self):
        self.fail("on_validation_epoch_end")

    def on_validation_end(self):
        self.fail("on_validation_end")
        if not self.trainer.sanity_checking:
            values = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
            self.metrics.append((self.global_step, values))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


VALIDATION = {
    "in order": lambda broken: DataLoader(Rows(broken), 2),
    "shuffled": lambda broken: DataLoader(Rows(broken), 2, shuffle=True),
    "with a generator": lambda broken: PrefetchLoader(Rows(broken), 2, shuffle=True, generator=seeded(3)),
    "whose dataset draws": lambda broken: PrefetchLoader(Rows(broken, np.random.default_rng(1), noise=True), 2),
    "two of them": lambda broken: [DataLoader(Rows(), 4), DataLoader(Rows(broken), 2)],
}


def fit(net, folder, kind="in order", ckpt=None, broken=None, callbacks=(), seed=0, **settings):
    pl.seed_everything(seed, verbose=False)
    callbacks = [SaveOnException(folder / "stopped.ckpt"), *callbacks]
    trainer = quiet_trainer(callbacks=callbacks, num_sanity_val_steps=0, **{"max_epochs": 3, **settings})
    train = PrefetchLoader(Rows(), 2, shuffle=True)
    trainer.fit(net, train, VALIDATION[kind](broken), ckpt_path=ckpt, **unpickling(False if ckpt else None))
    return trainer


# With Prefetch the random numbers of a validation that broke off are drawn again; the others make it again as a whole.
EXACT = {
    "prefetch": lambda: {"callbacks": (Prefetch(),)},
    "turbo and prefetch": lambda: {"strategy": "turbo", "callbacks": (Prefetch(),)},
    "steps": lambda: {"strategy": "turbo", "callbacks": (Prefetch(),), "max_steps": 12},
}
WHOLE = {
    "turbo": lambda: {"strategy": "turbo"},
    "callback": lambda: {"callbacks": (ExactResume(),)},
}


def break_off(kind, folder, how, *fails, by=Stop, **settings):
    """Return the nets of a run, of one that breaks off, and of its rest, which have made the same number of steps."""
    whole, first, rest = Net(), Net(*fails, how=by), Net()
    broken = fails[1] if fails[0] == "dataset" else None
    end = fit(whole, folder / "whole", kind, **how(), **settings)
    with pytest.raises((Stop, SystemExit)):
        fit(first, folder, kind, broken=broken, **how(), **settings)
    trainer = fit(rest, folder / "rest", kind, folder / "stopped.ckpt", seed=1, **how(), **settings)
    assert trainer.global_step == end.global_step
    steps = [each.fit_loop.epoch_loop._batches_that_stepped for each in (end, trainer)]
    assert steps[0] == steps[1]
    assert rest.validated
    return whole, first, rest


def check(kind, folder, how, *fails, **settings):
    """Check that the rest of a run that broke off equals that of one that did not."""
    whole, first, rest = break_off(kind, folder, EXACT[how], *fails, **settings)
    assert first.trained + rest.trained == whole.trained
    done = len(first.metrics)
    assert rest.metrics == whole.metrics[done:]
    assert first.metrics == whole.metrics[:done]
    assert rest.validated == whole.validated[len(whole.validated) - len(rest.validated) :]


def check_made_whole(kind, folder, how, *fails, **settings):
    """Check that the rest of a run that broke off has the batches of one that did not, with other random numbers."""
    whole, first, rest = break_off(kind, folder, WHOLE[how], *fails, **settings)
    trained = [each[:2] for each in whole.trained]
    assert [each[:2] for each in first.trained + rest.trained] == trained
    assert [step for step, _ in rest.metrics] == [step for step, _ in whole.metrics[len(first.metrics) :]]
    validated = [each[:3] for each in whole.validated]
    assert [each[:3] for each in rest.validated] == validated[len(validated) - len(rest.validated) :]
    assert len(rest.validated) >= len(whole.validated) // len(whole.metrics) * len(rest.metrics)


PLACES = [
    ("validation_step", 0, 0), ("validation_step", 3, 1), ("on_validation_batch_end", 3, 0),
    ("on_validation_epoch_end", None, 1), ("on_validation_end", None, 0), ("dataset", 5, 0),
]  # fmt: skip


# The generator of a dataset is not put back within a validation, which has loaded from it.
REPEATED = [kind for kind in VALIDATION if kind != "whose dataset draws"]


@matrix(("how", "fails"), list(EXACT), PLACES)
def test_a_validation_at_the_end_of_an_epoch_is_repeated_after_an_error(how, fails, tmp_path):
    check("shuffled", tmp_path, how, *fails)


@matrix(("kind", "fails"), REPEATED, [PLACES[1], PLACES[2], PLACES[5]])
def test_a_validation_in_the_middle_of_an_epoch_is_repeated_after_an_error(kind, fails, tmp_path):
    check(kind, tmp_path, "turbo and prefetch", *fails, val_check_interval=2)


@matrix(("how", "fails", "interval"), list(WHOLE), PLACES, [1.0, 2])
def test_without_prefetch_a_validation_is_made_again_as_a_whole(how, fails, interval, tmp_path):
    check_made_whole("shuffled", tmp_path, how, *fails, val_check_interval=interval)


@pytest.mark.parametrize("how", WHOLE)
def test_a_validation_whose_dataset_draws_is_made_again_as_a_whole(how, tmp_path):
    check_made_whole("whose dataset draws", tmp_path, how, "validation_step", 1, 1)


@pytest.mark.parametrize("kind", REPEATED)
def test_a_validation_on_part_of_the_data_is_repeated(kind, tmp_path):
    check(kind, tmp_path, "prefetch", "validation_step", 1, 1, limit_val_batches=2, check_val_every_n_epoch=1)


@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 2}], ids=["epoch", "middle"])
@pytest.mark.parametrize("how", ["turbo and prefetch", "prefetch"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_validation_is_repeated_after_a_signal(how, settings, at, tmp_path):
    """Lightning raises an exception after the batch in which the signal came."""
    check("shuffled", tmp_path, how, "validation_step", at, 1, by=signal.SIGTERM, **settings)


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_a_validation_is_repeated_after_the_batch_size_changed(batch_size, tmp_path):
    first, rest = Net("validation_step", 2, 0), Net()
    with pytest.raises(Stop):
        fit(first, tmp_path, callbacks=(ExactResume(),))
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[ExactResume()])
    loaders = PrefetchLoader(Rows(), batch_size, shuffle=True), DataLoader(Rows(), 2)
    trainer.fit(rest, *loaders, ckpt_path=tmp_path / "stopped.ckpt", **unpickling(False))
    assert [each[:2] for each in rest.trained] == [(1, i) for i in range(2 * BATCHES // batch_size)]
    assert [epoch for epoch, *_ in rest.validated] == [0] * BATCHES + [1] * BATCHES
    assert trainer.global_step == BATCHES + len(rest.trained)


@matrix(
    ("due", "kind", "how"), [(2, 2), (2, 6), (1.0, 4), (1.0, 8)], ["shuffled", "whose dataset draws"],
    ["turbo", "prefetch"],
)  # fmt: skip
def test_a_validation_that_was_due_runs_after_a_resume(due, kind, how, tmp_path):
    """Lightning saves a checkpoint of a step before the validation that follows it."""
    interval, step = due
    settings = {"val_check_interval": interval, "max_epochs": 3}
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1)
    whole, rest = Net(), Net()
    how = {**EXACT, **WHOLE}[how]()
    callbacks = how.pop("callbacks", ())
    fit(whole, tmp_path / "whole", kind, callbacks=(*callbacks, save), enable_checkpointing=True, **how, **settings)
    ckpt = tmp_path / f"step={step}.ckpt"
    fit(rest, tmp_path / "rest", kind, ckpt, seed=1, callbacks=callbacks, **how, **settings)
    assert rest.metrics == [each for each in whole.metrics if each[0] >= step]
    assert rest.trained == whole.trained[step:]


@pytest.mark.parametrize("kind", REPEATED)
def test_a_validation_at_whose_start_a_checkpoint_is_saved_is_made_with_its_generators(kind, tmp_path):
    check_next(kind, "on_validation_start", tmp_path)


@matrix(("kind", "hook"), list(VALIDATION), ["on_train_epoch_end", "on_validation_end", "on_train_batch_end"])
def test_the_next_validation_continues_the_generators_of_its_loaders(kind, hook, tmp_path):
    """Their generators, and those of their datasets, have the states of an uninterrupted run."""
    check_next(kind, hook, tmp_path)


def check_next(kind, hook, tmp_path):
    whole, rest = Net(), Net()
    settings = {"strategy": "turbo", "val_check_interval": 2}
    batches = 5 if hook == "on_train_batch_end" else 4
    fit(whole, tmp_path, kind, callbacks=(Prefetch(), Save(tmp_path / "at.ckpt", batches, hook)), **settings)
    fit(rest, tmp_path, kind, tmp_path / "at.ckpt", seed=1, callbacks=(Prefetch(),), **settings)
    assert rest.metrics
    assert rest.metrics == whole.metrics[-len(rest.metrics) :]
    assert rest.validated == whole.validated[-len(rest.validated) :]


def generators_of_their_own():
    return [PrefetchLoader(Rows(), 4, shuffle=True, generator=seeded(seed)) for seed in (3, 4)]


def one_generator():
    generator = seeded(3)
    return [PrefetchLoader(Rows(), 4, shuffle=True, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("place", [
    ("validation_step", 0, 1), ("on_validation_epoch_end", None, 1), ("on_validation_end", None, 1),
])  # fmt: skip
@pytest.mark.parametrize("make", [generators_of_their_own, one_generator])
def test_two_validation_loaders_with_generators_go_on_with_them(make, place, tmp_path, monkeypatch):
    """The first fails in the first loader of a validation, when the second one has not begun."""
    monkeypatch.setitem(VALIDATION, "two with generators", lambda broken: make())
    check("two with generators", tmp_path, "prefetch", *place)


class Shifted(Sampler):
    """Shifts its order by one more in each pass, and has a state."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return 2 * BATCHES

    def __iter__(self):
        self.passes += 1
        return iter([(3 * index + self.passes) % len(self) for index in range(len(self))])

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_validation_is_repeated_with_the_state_of_its_sampler(workers, tmp_path, monkeypatch):
    def make(broken):
        return PrefetchLoader(Rows(), 2, sampler=Shifted(), num_workers=workers)

    monkeypatch.setitem(VALIDATION, "with a state", make)
    check("with a state", tmp_path, "prefetch", "validation_step", 1, 1)


@pytest.mark.parametrize("validation", [0, 1])
def test_a_validation_of_worker_processes_that_stay_is_repeated_with_its_generator(validation, tmp_path, monkeypatch):
    """The first pass of their loader draws their seed, and later ones draw none."""
    settings = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    monkeypatch.setitem(VALIDATION, "stay", lambda broken: PrefetchLoader(Rows(), 2, generator=seeded(3), **settings))
    check("stay", tmp_path, "prefetch", "validation_step", 1, validation)


@pytest.mark.parametrize("batches", [2, 10])
def test_a_validation_of_every_second_epoch_continues_the_generator_of_its_loader(batches, tmp_path):
    """Lightning sets up no loaders of a validation where a run goes on in an epoch without one."""
    nets, ckpt = [], tmp_path / "at.ckpt"
    for path in (None, ckpt):
        nets.append(Net())
        save = Save(ckpt, batches) if path is None else ()
        callbacks = (Prefetch(), save) if save else (Prefetch(),)
        settings = {"check_val_every_n_epoch": 2, "max_epochs": 4, "callbacks": callbacks}
        fit(nets[-1], tmp_path, "with a generator", path, seed=bool(path), **settings)
    whole, rest = nets
    assert rest.validated
    assert rest.validated == whole.validated[-len(rest.validated) :]
    assert rest.metrics == whole.metrics[-len(rest.metrics) :]


class Reloaded(pl.LightningDataModule):
    """Its loaders are created again in each epoch, with newly seeded generators."""

    def train_dataloader(self):
        return PrefetchLoader(Rows(), 2, shuffle=True, generator=seeded(1))

    def val_dataloader(self):
        return PrefetchLoader(Rows(), 2, shuffle=True, generator=seeded(3))


@every_pair(
    ("settings", "stop", "every"),
    [{"val_check_interval": 2}, {"check_val_every_n_epoch": 2}],
    [(3, "on_train_batch_end"), (4, "on_train_epoch_end"), (5, "on_train_batch_end"), (6, "on_train_batch_end")],
    [1, 2],
)
def test_reloaded_validation_dataloaders_resume(settings, stop, every, tmp_path):
    batches, hook = stop
    settings = settings | {"reload_dataloaders_every_n_epochs": every, "num_sanity_val_steps": 2, "max_epochs": 4}
    nets = []
    for ckpt in (None, tmp_path / "at.ckpt"):
        pl.seed_everything(bool(ckpt), verbose=False)
        nets.append(Net())
        callbacks = [ExactResume()] if ckpt else [ExactResume(), Save(tmp_path / "at.ckpt", batches, hook)]
        trainer = quiet_trainer(callbacks=callbacks, **settings)
        trainer.fit(nets[-1], datamodule=Reloaded(), ckpt_path=ckpt, **unpickling(False if ckpt else None))
    whole, rest = nets
    assert rest.trained == whole.trained[batches:]
    assert rest.validated == whole.validated[-len(rest.validated) :]
    assert rest.metrics == whole.metrics[-len(rest.metrics) :]


def test_changed_validation_loaders_start_without_a_state(tmp_path):
    """A state of validation loaders never prevents a resume."""
    save = Save(tmp_path / "at.ckpt", 4, "on_train_epoch_end")
    fit(Net(), tmp_path, "with a generator", callbacks=(save,), strategy="turbo")
    for kind in ("in order", "two of them", "whose dataset draws"):
        rest = Net()
        fit(rest, tmp_path, kind, tmp_path / "at.ckpt", strategy="turbo", callbacks=(Prefetch(),))
        assert len(rest.metrics) == 2


def test_lightning_finishes_an_interrupted_validation_with_as_many_batches(tmp_path):
    with pytest.raises(Stop):
        fit(Net("validation_step", 2, 1), tmp_path)
    rest = Net()
    fit(rest, tmp_path, ckpt=tmp_path / "stopped.ckpt", max_epochs=2)
    assert [epoch for epoch, *_ in rest.validated] == [1, 1]
