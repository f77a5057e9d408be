"""PrefetchDataModule under a real Trainer: the same training, and nothing left behind."""

import functools
import pickle
import sqlite3
import threading
import time
from collections import defaultdict

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset

from lightning_turbo import Normalize, PrefetchDataModule, PrefetchLoader, tune_workers
from lightning_turbo.datamodules import prefetch
from lightning_turbo.errors import NoEffectWarning
from tests.integration.noting import Noting, Numbers, fit, gives
from tests.leftovers import nothing_is_left
from tests.trainers import quiet_trainer
from tests.unit.data.samples import Rows, Stream
from tests.versions import unpickling

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*You requested to overfit"),
    pytest.mark.filterwarnings("ignore:.*training_step. returned .None"),
    pytest.mark.filterwarnings("ignore:.*validation_step. but have no .val_dataloader"),
    pytest.mark.filterwarnings("ignore:.*predict_dataloader.*:UserWarning"),
]


class Theirs(LightningDataModule):
    """A DataModule as users have it, with an argument of the same name as one of ours."""

    def __init__(self, num_workers=0):
        super().__init__()
        self.num_workers = num_workers

    def loader(self, length=24, **settings):
        return DataLoader(Numbers(length), batch_size=4, num_workers=self.num_workers, **settings)

    def train_dataloader(self):
        return self.loader(shuffle=True)

    def val_dataloader(self):
        return [self.loader(8), self.loader(4)]

    def test_dataloader(self):
        return self.loader(8)

    def predict_dataloader(self):
        return self.loader(10)


class Mine(PrefetchDataModule, Theirs):
    pass


SETTINGS = {
    "two epochs": {},
    "limit_train_batches": {"limit_train_batches": 3, "limit_val_batches": 1},
    "no sanity check": {"num_sanity_val_steps": 0},
    "val_check_interval": {"val_check_interval": 2},
    "reload_dataloaders": {"reload_dataloaders_every_n_epochs": 1},
    "overfit_batches": {"overfit_batches": 2},
    "no distributed sampler": {"use_distributed_sampler": False},
    "fast_dev_run": {"fast_dev_run": True},
    "max_steps": {"max_steps": 8, "max_epochs": -1},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_training_is_the_same_bit_for_bit_and_nothing_is_left(settings):
    ours, plain = fit(Mine(), **settings), fit(Theirs(), **settings)
    assert ours.losses == plain.losses
    assert (ours.seen, ours.others) == (plain.seen, plain.others)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_fit_that_ends_early_leaves_nothing(workers, error):
    class Stops(Noting):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                self.trainer.should_stop = True
                if error is not None:
                    raise error
            return super().training_step(batch, batch_idx)

    if error is None:
        assert len(fit(Mine(num_workers=workers), model=Stops).seen) == 4
    else:
        with pytest.raises((error, SystemExit)):
            fit(Mine(num_workers=workers), model=Stops)
    nothing_is_left()


def test_fit_twice_then_test_and_predict():
    datamodule, model = Mine(), Noting()
    one = quiet_trainer(max_epochs=1)
    one.fit(model, datamodule=datamodule)
    one.fit_loop.max_epochs = 2
    one.fit(model, datamodule=datamodule)
    nothing_is_left()
    assert len(model.seen) == 12
    one.test(model, datamodule=datamodule, verbose=False)
    nothing_is_left()
    assert [batch for kind, *batch in model.others if kind == "test"] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    predicted = one.predict(model, datamodule=datamodule)
    nothing_is_left()
    assert torch.cat(predicted).tolist() == list(range(10))
    assert isinstance(one.predict_dataloaders, PrefetchLoader)


def test_it_can_be_inherited_alone_and_what_is_not_defined_stays_undefined():
    loader = DataLoader(Numbers(), 4, shuffle=True)
    plain = fit(Theirs(), limit_val_batches=0)
    for settings in ({"prefetch_batches": 2}, {"threads": 3}):
        model = fit(gives(loader, **settings))
        assert (model.losses, model.others) == (plain.losses, [])  # Lightning did not ask for validation loaders
    made = gives(loader, prefetch_batches=2).train_dataloader()
    assert isinstance(made, PrefetchLoader)
    assert made.prefetch_batches == 2
    with pytest.raises(MisconfigurationException, match="test_dataloader"):
        quiet_trainer().test(Noting(), datamodule=gives(loader), verbose=False)


A, B = DataLoader(Numbers(), 4), DataLoader(Numbers(8), 4)
STRUCTURES = {
    "list": [A, B],
    "dict": {"a": A, "b": B},
    "nested": {"a": A, "b": [B, (A,)]},
    "combined": CombinedLoader({"a": A, "b": B}, "max_size"),
    "defaultdict": defaultdict(list, {"a": A, "b": B}),
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_of_loaders(structure):
    class Sees(Noting):
        def training_step(self, batch, batch_idx):
            self.seen.append(str(batch))

    def prefetching(loaders):
        leaves = loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)
        return {isinstance(leaf, PrefetchLoader) for leaf in leaves}

    got = gives(structure).train_dataloader()
    assert type(got) is type(structure)
    assert prefetching(got) == {True}
    assert prefetching(structure) == {False}  # the user's own are left alone
    ours, plain = (fit(gives(structure, base), model=Sees) for base in (PrefetchDataModule, LightningDataModule))
    assert ours.seen == plain.seen


def test_other_iterables_are_handed_on():
    assert gives([range(3), 3]).train_dataloader() == [range(3), 3]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_from_datasets():
    datamodule = PrefetchDataModule.from_datasets(Numbers(), batch_size=4, prefetch_batches=3)
    assert isinstance(loader := datamodule.train_dataloader(), PrefetchLoader)
    assert (loader.batch_size, loader.prefetch_batches) == (4, 3)
    assert len(fit(datamodule).seen) == 12


def test_device_transform():
    class Sees(Noting):
        def training_step(self, batch, batch_idx):
            assert batch.dtype == torch.float32
            assert batch.unique().tolist() == pytest.approx([1.0])
            self.seen.append(batch_idx)

    class Hooked(Sees):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

    images = DataLoader(torch.full((8, 1, 2, 2), 255, dtype=torch.uint8), 4)
    datamodule = gives(images, device_transform=Normalize(0.5, 0.5))
    assert fit(datamodule, model=Sees, max_epochs=1).seen == [0, 1]
    with pytest.raises(MisconfigurationException, match=r"Hooked.on_before_batch_transfer is overridden. Call it in"):
        fit(datamodule, model=Hooked)


def test_device_prefetch_is_set_aside_with_a_warning_where_hooks_must_see_each_batch():
    """The choice alone: a strategy that says it works on a CUDA device is pretended."""

    class Hooked(Noting):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    class Strategy:
        root_device = torch.device("cuda", 0)

    class Pretended:
        strategy, lightning_module, callbacks = Strategy(), Hooked(), ()

    def transfer(**settings):
        datamodule = Mine(**settings)
        datamodule.trainer = Pretended()
        return datamodule.train_dataloader().transfer

    with pytest.warns(NoEffectWarning, match=r"has no effect, because Hooked.transfer_batch_to_device is overridden"):
        assert transfer() is None
    assert transfer(device_prefetch=False) is None
    Strategy.device_prefetch = True
    Pretended.lightning_module = Noting()
    assert transfer() is None


def test_auto_workers(capsys):
    datamodule = Mine(auto_workers=True)
    first = datamodule.train_dataloader()
    assert "workers  batches" in capsys.readouterr().out
    assert datamodule.train_dataloader().num_workers == first.num_workers
    assert capsys.readouterr().out == ""  # measured once
    nothing_is_left()


class Unmeasurable(Rows):
    def __init__(self, length, pause=0.0, error=None, thing=None):
        super().__init__(length)
        self.pause, self.error, self.thing = pause, error, {"inside": [thing]}

    def __getitem__(self, index):
        time.sleep(self.pause)
        if self.error is not None:
            raise self.error
        return torch.ones(32)


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Unmeasurable(0), "the loader is empty"),
        pytest.param(Unmeasurable(2, pause=2.5), "too late", marks=pytest.mark.slow),
        (Unmeasurable(2, error=OSError("bad disk")), "bad disk"),
    ],
)
def test_auto_workers_leave_a_loader_alone_that_gives_nothing_to_measure(dataset, why, monkeypatch):
    monkeypatch.setattr(prefetch, "tune_workers", functools.partial(tune_workers, seconds=2.0, show=None))
    datamodule = gives(DataLoader(dataset, batch_size=1), auto_workers=True)
    told = f"leaves a loader of train_dataloader as it is, with num_workers=0: .*{why}"
    with pytest.warns(NoEffectWarning, match=told):
        loader = datamodule.train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (0, None, False)
    if dataset.error is None:
        assert len(list(datamodule.train_dataloader())) == dataset.length  # and is not measured again
    else:
        with pytest.raises(OSError, match="bad disk"):
            next(iter(loader))
    nothing_is_left()


KEPT = {
    "a stream": (Stream, "is an IterableDataset"),
    "an open file": (lambda: Unmeasurable(8, thing=open(__file__, "rb")), "processes cannot share"),  # noqa: SIM115
    "a connection": (lambda: Unmeasurable(8, thing=sqlite3.connect(":memory:")), "processes cannot share"),
    "half of it": (lambda: Subset(Unmeasurable(8, thing=threading.Lock()), range(4)), "processes cannot share"),
}


@pytest.mark.parametrize(("make", "why"), KEPT.values(), ids=KEPT)
def test_auto_workers_keep_0_workers_where_processes_could_load_other_data(make, why):
    dataset = make()
    with pytest.warns(NoEffectWarning, match=f"leaves a loader of train_dataloader as it is, .*{why}"):
        loader = gives(DataLoader(dataset, batch_size=2), num_workers="auto").train_dataloader()
    assert loader.num_workers == 0
    if getattr(dataset, "thing", None):
        dataset.thing["inside"][0].close()


class Shares(Numbers):
    """As one file that the whole DataModule reads: two threads must not be inside at the same time."""

    lock = threading.Lock()

    def __getitem__(self, index):
        assert self.lock.acquire(blocking=False), "two threads read at once"
        time.sleep(0.001)
        self.lock.release()
        return super().__getitem__(index)


def test_loaders_of_one_datamodule_load_in_turns_whatever_they_share():
    datamodule = gives(DataLoader(Shares(32), batch_size=2))
    datamodule.val_dataloader = lambda: DataLoader(Shares(32), batch_size=2)
    fit(datamodule, val_check_interval=4, max_epochs=1)


def test_a_loader_with_prefetching_of_its_own_is_used_as_it_is():
    own = PrefetchLoader(Numbers(), 4, prefetch_batches=2, threads=3)
    next(iter(own))
    own.load_state_dict(own.state_dict())
    loader = gives(own, prefetch_batches=5).train_dataloader()
    assert loader is own
    assert (loader.prefetch_batches, loader.threads) == (2, 3)
    assert len(list(loader)) == 5  # it goes on from the state that was loaded


def test_a_constructor_that_does_not_call_up_is_told():
    class Forgets(Mine):
        def __init__(self):
            self.x = 1

    with pytest.raises(RuntimeError, match=r"Forgets.__init__ does not call super\(\).__init__\(\)"):
        Forgets().train_dataloader()


def test_it_can_be_pickled():
    twin = pickle.loads(pickle.dumps(Mine(prefetch_batches=3, threads=2)))
    loader = twin.train_dataloader()
    assert (loader.prefetch_batches, loader.threads) == (3, 2)


class Saves(LightningDataModule):
    """A DataModule that saves its arguments and works with what it saved."""

    def __init__(self, batch_size: int = 4, num_workers: int = 0, pin_memory: bool = False):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(Numbers(), **{name: self.hparams[name] for name in ("batch_size", "num_workers")})


class SavesMine(PrefetchDataModule, Saves):
    pass


class HandsOn(Saves):
    def __init__(self, root="here", **kwargs):
        super().__init__(**kwargs)


class HandsOnMine(PrefetchDataModule, HandsOn):
    pass


@pytest.mark.parametrize("cls", [SavesMine, HandsOnMine])
@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"batch_size": 8}], ids=str)
def test_a_class_behind_that_saves_its_arguments_finds_what_it_got(cls, given, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["train"])
    words = [f"--data.{name}={value}" for name, value in given.items()]
    cli = LightningCLI(Noting, cls, run=False, args=words, seed_everything_default=False)
    one = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    one.fit(Noting(), datamodule=cls(**given))
    one.save_checkpoint(tmp_path / "one.ckpt")
    again = cls.load_from_checkpoint(tmp_path / "one.ckpt", **unpickling(False))
    got = {"batch_size": 4, "num_workers": 0, "pin_memory": False, **given}
    for datamodule in (one.datamodule, again, cli.datamodule):
        assert {name: datamodule.hparams[name] for name in got} == got
        loader = datamodule.train_dataloader()
        assert isinstance(loader, PrefetchLoader)
        assert loader.batch_size == got["batch_size"]
    assert again.hparams == one.datamodule.hparams


def test_arguments_given_by_position_and_of_one_in_front_are_saved():
    class InFront(SavesMine):
        def __init__(self, num_workers=None):
            super().__init__(num_workers=num_workers)

    assert SavesMine(2, 1).hparams["num_workers"] == 1
    assert InFront(1).hparams["num_workers"] == 1
    with pytest.raises(TypeError, match=r"Saves.__init__\(\) got an unexpected keyword argument 'batches'"):
        SavesMine(batches=1)
