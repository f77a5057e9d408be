"""Checkpoints of ``ExactResume``: the state of validation loaders, and what is left to Lightning."""

from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_turbo import ExactResume, Prefetch, PrefetchLoader
from lightning_turbo._random import generator_state
from lightning_turbo.callbacks import exact_resume
from tests.data.samples import Rows
from tests.integration.recording import Save
from tests.trainers import quiet_trainer
from tests.versions import unpickling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:sample_seeds seeds:lightning_turbo.errors.NoEffectWarning"),
]


def noisy(index):
    return torch.cat([torch.full((1,), float(index)), torch.rand(3)])


class Net(pl.LightningModule):
    """Records the random numbers of each validation sample by epoch and sample."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.trained, self.validated = [], []

    def training_step(self, batch, index):
        self.trained.append(batch[:, 0].tolist())
        return self.net(batch).square().mean()

    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:
            self.validated += [(self.global_step, self.current_epoch, *row.tolist()) for row in batch]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(*callbacks, loaders=(), ckpt=None, **settings):
    pl.seed_everything(0 if ckpt is None else 1, verbose=False)
    net = Net()
    train, validation = loaders or (DataLoader(Rows(8, noisy), 4), DataLoader(Rows(8, noisy), 4))
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 3, **settings})
    trainer.fit(net, train, validation, ckpt_path=ckpt, **unpickling(False if ckpt else None))
    return net, trainer


@pytest.mark.parametrize(("settings", "workers"), [
    ({}, 0), ({"val_check_interval": 1}, 0), ({"check_val_every_n_epoch": 2}, 0), ({"check_val_every_n_epoch": 2}, 1),
    pytest.param({}, 1, marks=pytest.mark.slow), pytest.param({"val_check_interval": 1}, 1, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_seeds_of_validation_samples_depend_on_the_epoch_after_a_resume(workers, settings, tmp_path):
    def loaders():
        return [DataLoader(Rows(8, noisy), 4, num_workers=workers) for _ in range(2)]

    settings = {"max_epochs": 4, **settings}
    save = Save(tmp_path / "at.ckpt", 4, "on_train_epoch_end")
    whole, _ = fit(Prefetch(sample_seeds=3), save, loaders=loaders(), **settings)
    rest, _ = fit(Prefetch(sample_seeds=3), loaders=loaders(), ckpt=tmp_path / "at.ckpt", **settings)
    assert rest.validated
    assert rest.validated == whole.validated[-len(rest.validated) :]


def test_seeds_of_validation_samples_are_the_same_on_any_number_of_ranks():
    def numbers(ranks, rank):
        data = Rows(8, noisy)
        loaders = [DataLoader(data, 2, sampler=DistributedSampler(data, ranks, rank, shuffle=False)) for _ in range(2)]
        net, _ = fit(Prefetch(sample_seeds=3), loaders=loaders, use_distributed_sampler=False, val_check_interval=1.0)
        return {row[1:] for row in net.validated}

    one = fit(Prefetch(sample_seeds=3))[0].validated
    assert {row[1:] for row in one} == numbers(2, 0) | numbers(2, 1)
    assert len({row[1:] for row in one}) == 3 * 8


def test_a_loader_counts_its_passes_without_a_trainer():
    loader = PrefetchLoader(Rows(8, noisy), 4, sample_seeds=3)
    first, second = (torch.cat(list(loader)) for _ in range(2))
    assert not torch.equal(first, second)
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), torch.cat(list(iterator))
    later = torch.cat(list(loader))
    again = PrefetchLoader(Rows(8, noisy), 4, sample_seeds=3)
    again.load_state_dict(state)
    assert torch.equal(torch.cat(list(again)), rest)
    assert torch.equal(torch.cat(list(again)), later)


class Writer(pl.callbacks.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.seen = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.seen.append((dataloader_idx, indices))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.filterwarnings("ignore:.*num_workers.*bottleneck")
def test_prediction_writers_get_the_indices_of_their_batches(number, workers):
    def predict(*callbacks):
        writer = Writer()
        trainer = quiet_trainer(callbacks=[*callbacks, writer])
        loaders = [DataLoader(torch.zeros(6 + each, 32), 2, num_workers=workers) for each in range(number)]
        trainer.predict(BoringModel(), loaders, return_predictions=False)
        return writer.seen

    assert predict(Prefetch(sample_seeds=1)) == predict(Prefetch()) == predict()


class Half(DataLoader):
    """Has only one of the two methods of a stateful loader."""

    def load_state_dict(self, state):
        raise AssertionError(f"{state} is of another loader")


def test_a_loader_without_state_dict_is_not_stateful(tmp_path):
    def loaders():
        return [Half(Rows(8, noisy), 4, shuffle=True), DataLoader(Rows(8, noisy), 4)]

    save = Save(tmp_path / "at.ckpt", 4, "on_train_epoch_end")
    whole, _ = fit(ExactResume(), save, loaders=loaders())
    rest, _ = fit(ExactResume(), loaders=loaders(), ckpt=tmp_path / "at.ckpt")
    assert rest.trained == whole.trained[4:]
    assert rest.trained


# The parts of ExactResume


def order(loader):
    return [batch[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("held", [1, 0, 2])
def test_a_loader_without_a_position_gets_the_states_of_its_generators(held):
    loader = DataLoader(Rows(8, noisy), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    states = [generator_state(each) for each in exact_resume._generators_of(loader)]
    before = order(loader)
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader]))
    exact_resume._set_generators(loop, [(states * 2)[:held]])
    assert (order(loader) == before) is (held == 1)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_an_error_in_train_dataloader_reaches_the_user(tmp_path):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            raise ValueError("no such folder")

    fit(ExactResume(), Save(tmp_path / "at.ckpt", 2, "on_train_epoch_end"))
    trainer = quiet_trainer(callbacks=[ExactResume()], max_epochs=3)
    with pytest.raises(ValueError, match="no such folder"):
        trainer.fit(Net(), datamodule=Data(), ckpt_path=tmp_path / "at.ckpt", **unpickling(False))
    loop = trainer.fit_loop
    assert not {"setup_data", "_load_combined_loader_states"} & vars(loop).keys()


def test_after_an_error_on_another_rank_the_last_metrics_are_saved(monkeypatch):
    """Computing the current values would wait for the other ranks."""

    class Alone:
        _logger_connector = SimpleNamespace(_callback_metrics={"loss": torch.tensor(2.0), "name": "text"})

        @property
        def callback_metrics(self):
            raise AssertionError("waits for ever")

    monkeypatch.setattr(exact_resume, "rank_and_size", lambda: (0, 2))
    try:
        raise KeyError("of this rank")
    except KeyError:
        assert exact_resume._metrics(Alone()) == {"loss": torch.tensor(2.0)}


@pytest.mark.parametrize(("state", "calls"), [
    ({"cuda": "its own"}, [("state", "its own")]), ({"seed": 5}, [("seed", 5)]), ({}, []),
])  # fmt: skip
def test_the_generator_of_a_device_gets_its_saved_state_or_that_of_a_new_rank(state, calls, monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda own, device: called.append(("state", own)))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: called.append(("seed", seed)))
    numbers = torch.get_rng_state()
    torch.rand(1)
    on_device = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda", 0)))
    exact_resume._set_random_states(on_device, {"torch": numbers, **state})
    assert called == calls
    assert torch.equal(torch.get_rng_state(), numbers)


class Monitored(Net):
    """Logs a value of its validation, by which a scheduler lowers the rate of each epoch that is no better."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def training_step(self, batch, index):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log("val", float(self.current_epoch), batch_size=len(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.08)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("batches", [3, 4])
def test_a_plateau_is_updated_after_a_resume(batches, hook, tmp_path):
    """In the middle of an epoch and at its end, between its value and its update."""

    def go(*callbacks, ckpt=None):
        net = Monitored()
        loaders = [PrefetchLoader(Rows(8, noisy), 4) for _ in range(2)]
        trainer = quiet_trainer(callbacks=[ExactResume(), *callbacks], max_epochs=5, num_sanity_val_steps=0)
        trainer.fit(net, *loaders, ckpt_path=ckpt, **unpickling(False if ckpt else None))
        return net.rates, trainer.lr_scheduler_configs[0].scheduler.state_dict()

    path = tmp_path / "at.ckpt"
    whole, end = go(Save(path, batches, hook))
    assert whole[-1] < whole[0]
    if path.exists():  # the last two hooks are those of an epoch's end
        assert go(ckpt=path) == (whole[batches:], end)
    else:
        assert batches == 3
        assert hook != "on_train_batch_end"


@pytest.mark.parametrize("callback", [ExactResume, Prefetch])
def test_metrics_of_before_a_resume_can_be_asked_for(callback, tmp_path):
    """As ModelCheckpoint(monitor=..., every_n_train_steps=...) does between validations."""

    class Asks(pl.Callback):
        def __init__(self):
            self.found = []

        def on_train_batch_end(self, trainer, *_):
            self.found.append(trainer.callback_metrics.get("val"))

    def go(*callbacks, ckpt=None):
        asks = Asks()
        trainer = quiet_trainer(callbacks=[callback(), asks, *callbacks], max_epochs=3, num_sanity_val_steps=0)
        loaders = [PrefetchLoader(Rows(8, noisy), 2) for _ in range(2)]
        trainer.fit(Monitored(), *loaders, ckpt_path=ckpt, **unpickling(False if ckpt else None))
        return asks.found

    path = tmp_path / "at.ckpt"
    whole = go(Save(path, 6))
    assert whole[5] is not None
    assert go(ckpt=path) == whole[6:]


class Labeled(torch.Tensor):
    """A tensor of a library's own class, as MONAI's ``MetaTensor``."""


def test_metrics_and_their_names_are_saved_without_the_class_of_a_library(tmp_path):
    class Logs(Monitored):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx).as_subclass(Labeled)
            self.log(np.array(["train_loss"])[0], loss)
            assert type(self.trainer.callback_metrics["train_loss"]) is Labeled
            return loss

    path = tmp_path / "at.ckpt"
    trainer = quiet_trainer(callbacks=[ExactResume(), Save(path, 6)], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Logs(), *[PrefetchLoader(Rows(8, noisy), 2) for _ in range(2)])
    assert torch.load(path, weights_only=True)["global_step"] == 6


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"])
@pytest.mark.parametrize("batches", [2, 4, 6])
def test_a_save_within_a_validation_by_the_loader_of_the_training_resumes_equal(batches, hook, tmp_path):
    def go(*callbacks, ckpt=None):
        pl.seed_everything(0 if ckpt is None else 1, verbose=False)
        net, loader = Net(), PrefetchLoader(Rows(8, noisy), 2, shuffle=True)
        trainer = quiet_trainer(
            callbacks=[Prefetch(), *callbacks], max_epochs=3, num_sanity_val_steps=0, val_check_interval=2
        )
        trainer.fit(net, loader, loader, ckpt_path=ckpt, **unpickling(False if ckpt else None))
        return net.trained, net.validated, net.net.weight.tolist()

    path = tmp_path / "at.ckpt"
    trained, validated, weight = go(Save(path, batches, hook))
    rest, again, end = go(ckpt=path)
    assert rest == trained[batches:]
    assert end == weight
    assert again == validated[len(validated) - len(again) :]
    assert again


def train_loaders(kind):
    data = torch.arange(16.0)[:, None].expand(16, 4)
    plain = DataLoader(data, 2)
    return {
        "one": plain,
        "two": {"a": plain, "b": DataLoader(data, 4)},
        "of the script": PrefetchLoader(data, 2),
    }[kind]


class Taking(Net):
    def training_step(self, batch, index):
        batch = batch["a"] if isinstance(batch, dict) else batch
        return super().training_step(batch, index)


@pytest.mark.parametrize("kind", ["one", "two", "of the script"])
@pytest.mark.parametrize("saved_with", [True, False])
@pytest.mark.parametrize("resumed_with", [True, False])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*")
def test_a_checkpoint_resumes_with_and_without_prefetch(kind, saved_with, resumed_with, tmp_path):
    """Exactly with prefetch, and at the beginning of the epoch without, as a plain checkpoint does."""

    def train(*callbacks, ckpt=None):
        net = Taking()
        settings = {"max_epochs": 2, "limit_val_batches": 0}
        trainer = quiet_trainer(callbacks=list(callbacks), **settings)
        trainer.fit(net, train_loaders(kind), ckpt_path=ckpt, **unpickling(False if ckpt else None))
        return net.trained, trainer.global_step

    path = tmp_path / "at.ckpt"
    whole, steps = train(*[Prefetch()] * saved_with, Save(path, 3, "on_train_batch_end"))
    rest, end = train(*[Prefetch()] * resumed_with, ckpt=path)
    assert end == steps
    if saved_with and resumed_with:
        assert rest == whole[3:]
