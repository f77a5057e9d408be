"""Prefetch and PrefetchDataModule in a real Trainer: the same training, and nothing left behind."""

import copy
import gc
import itertools
import pickle
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_turbo import ExactResume, Normalize, Prefetch, PrefetchDataModule, PrefetchLoader
from lightning_turbo.errors import NoEffectWarning
from tests.integration.recording import Numbers, RecordingModel, fit, gives
from tests.leftovers import nothing_is_left, wait_until
from tests.trainers import quiet_trainer
from tests.versions import unpickling

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*You requested to overfit"),
    pytest.mark.filterwarnings("ignore:.*training_step. returned .None"),
    pytest.mark.filterwarnings("ignore:.*validation_step. but have no .val_dataloader"),
    pytest.mark.filterwarnings("ignore:.*predict_dataloader.*:UserWarning"),
]


class Theirs(LightningDataModule):
    """A user's DataModule with an argument that has the same name as one of ours."""

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


class Unseeing(RecordingModel):
    """Takes batches of any structure."""

    def training_step(self, batch, batch_idx):
        self.seen.append(str(batch))


def loaders_of(data, *callbacks, **settings):
    """Run a fit and return the training loaders that the Trainer iterated, in their original structure."""
    model = fit(data, *callbacks, model=Unseeing, **{"limit_val_batches": 0, "max_epochs": 1, **settings})
    return model.trainer.train_dataloader


DOORS = {
    "datamodule": lambda loaders, **settings: (gives(loaders, **settings),),
    "callback": lambda loaders, **settings: (gives(loaders, LightningDataModule), Prefetch(**settings)),
    "loaders to fit": lambda loaders, **settings: (loaders, Prefetch(**settings)),
}
EACH_DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


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
def test_training_with_prefetch_is_the_same_bit_for_bit_and_leaves_nothing_behind(settings):
    plain = fit(Theirs(), **settings)
    for ours in (fit(Mine(), **settings), fit(Theirs(), Prefetch(), **settings)):
        assert ours.losses == plain.losses
        assert (ours.seen, ours.others) == (plain.seen, plain.others)


@pytest.mark.parametrize(("workers", "error"), [(0, ValueError), (1, None), (1, KeyboardInterrupt)])
def test_a_fit_with_prefetch_that_ends_early_leaves_nothing_behind(workers, error):
    class Stops(RecordingModel):
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


def test_prefetch_with_two_fits_a_test_and_a_prediction():
    datamodule, model = Mine(), RecordingModel()
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


def test_prefetch_datamodule_can_be_the_only_base_class_and_defines_no_other_hooks():
    loader = DataLoader(Numbers(), 4, shuffle=True)
    plain = fit(Theirs(), limit_val_batches=0)
    for settings in ({"prefetch_batches": 2}, {"threads": 3}):
        model = fit(gives(loader, **settings))
        assert (model.losses, model.others) == (plain.losses, [])  # Lightning did not ask for validation loaders
    with pytest.raises(MisconfigurationException, match="test_dataloader"):
        quiet_trainer().test(RecordingModel(), datamodule=gives(loader), verbose=False)


A, B = DataLoader(Numbers(), 4), DataLoader(Numbers(8), 4)
STRUCTURES = {
    "one": A,
    "list": [A, B],
    "dict": {"a": A, "b": B},
    "nested": {"a": A, "b": [B, (A,)]},
    "combined": CombinedLoader({"a": A, "b": B}, "max_size"),
    "defaultdict": defaultdict(list, {"a": A, "b": B}),
}


@EACH_DOOR
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_prefetch_accepts_loaders_in_any_structure(structure, door):
    def leaves(loaders):
        return loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)

    ours = fit(*door(structure, threads=2), model=Unseeing, limit_val_batches=0)
    got = ours.trainer.train_dataloader
    assert structure is A or type(got) is type(getattr(structure, "iterables", structure))
    assert {(type(leaf), leaf.threads) for leaf in leaves(got)} == {(PrefetchLoader, 2)}
    # The user's structure is not changed, except for a CombinedLoader, whose parts Lightning replaces.
    assert {type(leaf) for leaf in tree_leaves(structure)} <= {DataLoader, CombinedLoader}
    plain = fit(gives(structure, LightningDataModule), model=Unseeing, limit_val_batches=0)
    assert ours.seen == plain.seen


class Wrapper:
    """Like webdataset's WebLoader: a loader followed by further stages."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)


@EACH_DOOR
@pytest.mark.parametrize("make", [lambda: range(3), lambda: Wrapper(A), lambda: [torch.ones(2)] * 2])
def test_an_iterable_that_is_not_a_dataloader_is_not_wrapped_and_warns(make, door):
    foreign = make() if not isinstance(make(), list) else {"a": Wrapper(make())}
    with pytest.warns(NoEffectWarning, match="has no effect on a (range|Wrapper), which is not a DataLoader"):
        got = loaders_of(*door(foreign, sample_seeds=1))
    assert got is foreign or got["a"] is foreign["a"]


class Live(IterableDataset):
    """An endless stream: samples that are drawn ahead of the Trainer are lost."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(0.002)
        self.count += 1
        return self.count


@EACH_DOOR
@pytest.mark.parametrize("limit", [5, 1])
def test_a_live_stream_loses_no_sample_with_limit_train_batches(door, limit):
    class Slow(Unseeing):
        def training_step(self, batch, batch_idx):
            time.sleep(0.004)
            self.seen.append(int(batch))

    settings = {"limit_train_batches": limit, "max_epochs": 3, "limit_val_batches": 0}
    live = DataLoader(Live(), batch_size=1)
    assert fit(*door(live), model=Slow, **settings).seen == list(range(1, 3 * limit + 1))


def test_validation_of_a_live_stream_draws_only_limit_val_batches():
    live = Live()
    stream = DataLoader(live, batch_size=1)
    model = type("Any", (Unseeing,), {"validation_step": lambda *_: None})
    fit(A, Prefetch(), validation=stream, model=model, limit_val_batches=2, num_sanity_val_steps=1, max_epochs=3)
    assert live.count == 1 + 3 * 2


def as_static(loader):
    return staticmethod(lambda: loader)


def as_class_method(loader):
    return classmethod(lambda _: loader)


@pytest.mark.parametrize("kind", [as_static, as_class_method])
@pytest.mark.parametrize("bases", [(PrefetchDataModule,), (PrefetchDataModule, LightningDataModule), (Mine,)])
def test_dataloader_methods_may_be_static_or_class_methods(kind, bases):
    datamodule = type("Data", bases, {"train_dataloader": kind(A)})()
    assert isinstance(loaders_of(datamodule), PrefetchLoader)
    datamodule = type("Data", bases, {})()
    datamodule.train_dataloader = lambda: A  # on the object
    assert isinstance(loaders_of(datamodule), PrefetchLoader)


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
def test_training_and_validation_may_share_one_loader():
    loader = DataLoader(Numbers(), 4, shuffle=True)
    settings = {"validation": loader, "val_check_interval": 2}
    plain, ours = fit(loader, **settings), fit(loader, Prefetch(), **settings)
    assert (ours.seen, ours.others) == (plain.seen, plain.others)


@pytest.mark.parametrize("exact_resume", [True, False])
@pytest.mark.parametrize("door", list(DOORS)[:2])
def test_exact_resume_is_added_on_request(door, exact_resume):
    data, *callbacks = DOORS[door](A, exact_resume=exact_resume)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0, callbacks=callbacks)
    own = [*trainer.callbacks]
    trainer.fit(RecordingModel(), datamodule=data)
    added = [type(each) for each in trainer.callbacks if each not in own]
    assert added == [ExactResume] * exact_resume


@pytest.mark.parametrize("error", [None, OSError])
def test_prefetch_ends_with_the_run_of_its_datamodule(error):
    class Stops(RecordingModel):
        def on_train_batch_end(self, *_):
            if error is not None:
                raise error

    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    try:
        trainer.fit(Stops(), datamodule=Mine())
    except OSError:
        nothing_is_left()
    assert "process_dataloader" not in vars(trainer.strategy)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(RecordingModel(), datamodule=Theirs())
    assert type(trainer.train_dataloader) is DataLoader


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_prefetch_datamodule_from_datasets():
    datamodule = PrefetchDataModule.from_datasets(Numbers(), batch_size=4, prefetch_batches=3)
    loader = loaders_of(datamodule)
    assert isinstance(loader, PrefetchLoader)
    assert (loader.batch_size, loader.prefetch_batches) == (4, 3)


def test_prefetch_applies_the_device_transform():
    class Sees(RecordingModel):
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


def test_the_users_loader_gets_its_device_transfer_back_after_the_run():
    loader = PrefetchLoader(torch.ones(4, 4), 2)
    fit(loader, Prefetch(device_transform=lambda batch: batch * 0))
    assert loader.transfer is None
    assert next(iter(loader)).sum() == 8


def test_device_prefetch_is_disabled_with_a_warning_if_transfer_hooks_are_overridden():
    """Tests only the decision, with a fake strategy that reports a CUDA device."""

    class Hooked(RecordingModel):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    class Strategy:
        root_device = torch.device("cuda", 0)

        def process_dataloader(self, loader):
            return loader

    class Pretended:
        strategy, lightning_module, callbacks, world_size = Strategy(), Hooked(), (), 1

    def transfer(**settings):
        callback = Prefetch(**settings)
        callback.setup(Pretended, Pretended.lightning_module, "fit")
        loader = Pretended.strategy.process_dataloader(A)
        callback.teardown(Pretended, Pretended.lightning_module, "fit")
        assert isinstance(loader, PrefetchLoader)
        return loader.transfer

    with pytest.warns(NoEffectWarning, match=r"has no effect, because Hooked.transfer_batch_to_device is overridden"):
        assert transfer() is None
    assert transfer(device_prefetch=False) is None
    Strategy.device_prefetch = True
    Pretended.lightning_module = RecordingModel()
    assert transfer() is None


class Shares(Numbers):
    """Like one file that all loaders of the DataModule read: two threads must not read at the same time."""

    lock = threading.Lock()

    def __getitem__(self, index):
        assert self.lock.acquire(blocking=False), "two threads read at once"
        time.sleep(0.001)
        self.lock.release()
        return super().__getitem__(index)


@pytest.mark.parametrize("settings", [{}, {"overfit_batches": 8}], ids=["as given", "recreated by Lightning"])
def test_loaders_of_one_datamodule_never_load_at_the_same_time(settings):
    datamodule = gives(DataLoader(Shares(32), batch_size=2))
    datamodule.val_dataloader = lambda: DataLoader(Shares(32), batch_size=2)
    fit(datamodule, val_check_interval=4, max_epochs=1, **settings)


class Forever:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        while True:
            yield from self.batches


class Endless(DataLoader):
    """Keeps one endless iterator for all epochs. Its worker processes end with the loader."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
        self.endless = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.batches)

    def __iter__(self):
        return itertools.islice(self.endless, len(self))

    def __del__(self):
        if hasattr(self.endless, "_shutdown_workers"):
            self.endless._shutdown_workers()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_one_endless_iterator(workers):
    def run(base):
        loader, module = Endless(Numbers(), 4, num_workers=workers), RecordingModel()
        quiet_trainer(max_epochs=3).fit(module, gives(loader, base))
        loader.__del__()
        return module.seen

    assert run(PrefetchDataModule) == run(LightningDataModule)


def test_a_loader_that_prefetches_is_not_wrapped():
    own = PrefetchLoader(Numbers(), 4, prefetch_batches=2, threads=3)
    next(iter(own))
    own.load_state_dict(own.state_dict())
    model = fit(gives(own, prefetch_batches=5), max_epochs=1)
    assert model.trainer.train_dataloader is own
    assert (own.prefetch_batches, own.threads) == (2, 3)
    assert len(model.seen) == 5  # it resumes from the loaded state


def test_a_constructor_without_super_init_is_an_error():
    class Forgets(Mine):
        def __init__(self):
            self.x = 1

    with pytest.raises(RuntimeError, match=r"Forgets.__init__ does not call super\(\).__init__\(\)"):
        fit(Forgets())


def test_prefetch_datamodule_can_be_pickled():
    twin = pickle.loads(pickle.dumps(Mine(prefetch_batches=3, threads=2)))
    loader = loaders_of(twin)
    assert (loader.prefetch_batches, loader.threads) == (3, 2)


class Saves(LightningDataModule):
    """A DataModule that calls ``save_hyperparameters`` and uses ``hparams``."""

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
@pytest.mark.parametrize("given", [{}, {"num_workers": 1, "batch_size": 8}], ids=str)
def test_save_hyperparameters_of_a_base_class_finds_its_arguments(cls, given, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["train"])
    words = [f"--data.{name}={value}" for name, value in given.items()]
    cli = LightningCLI(RecordingModel, cls, run=False, args=words, seed_everything_default=False)
    one = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    one.fit(RecordingModel(), datamodule=cls(**given))
    one.save_checkpoint(tmp_path / "one.ckpt")
    again = cls.load_from_checkpoint(tmp_path / "one.ckpt", **unpickling(False))
    got = {"batch_size": 4, "num_workers": 0, "pin_memory": False, **given}
    for datamodule in (one.datamodule, again, cli.datamodule):
        assert {name: datamodule.hparams[name] for name in got} == got
        assert datamodule.train_dataloader().batch_size == got["batch_size"]
    assert type(one.train_dataloader) is PrefetchLoader
    assert again.hparams == one.datamodule.hparams


def test_save_hyperparameters_includes_positional_arguments_and_those_of_a_subclass():
    class InFront(SavesMine):
        def __init__(self, num_workers=None):
            super().__init__(num_workers=num_workers)

    assert SavesMine(2, 1).hparams["num_workers"] == 1
    assert InFront(1).hparams["num_workers"] == 1
    with pytest.raises(TypeError, match=r"Saves.__init__\(\) got an unexpected keyword argument 'batches'"):
        SavesMine(batches=1)


@pytest.mark.parametrize("reload", [0, 1])
def test_the_users_prefetch_loader_is_restored_after_the_run(reload):
    loader = PrefetchLoader(Numbers(), 4)
    run = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": reload}
    added = Prefetch(device_transform=lambda batch: batch)
    fit(gives(loader, LightningDataModule), added, **run)
    assert loader.transfer is None
    assert loader._limit is None


class Drawing(Numbers):
    """Draws random numbers while it loads."""

    def __getitem__(self, index):
        row, number = super().__getitem__(index)
        return row + torch.rand(()), number


BROKEN_OFF = {
    "shuffled": lambda own, workers: DataLoader(Numbers(22), 4, shuffle=True, generator=own, **workers),
    "lazy": lambda own, workers: DataLoader(
        Numbers(22), 4, sampler=RandomSampler(Numbers(22), True, 200, own), **workers
    ),
    "drawing": lambda own, workers: DataLoader(Drawing(40) if workers else Numbers(40), 4, generator=own, **workers),
}


STAYING = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize(("loader", "workers"), [
    ("shuffled", {}), ("lazy", {}), ("drawing", {}), ("drawing", STAYING),
    pytest.param("shuffled", STAYING, marks=pytest.mark.slow), pytest.param("lazy", STAYING, marks=pytest.mark.slow),
])  # fmt: skip
def test_prefetch_with_epochs_that_end_early(loader, workers):
    loader = BROKEN_OFF[loader]

    def run(base, pause):
        class Data(base):
            def __init__(self):
                super().__init__()
                self.own = [torch.Generator().manual_seed(seed) for seed in range(2)]

            def train_dataloader(self):
                return loader(self.own[0], workers)

            def val_dataloader(self):
                return [loader(self.own[1], workers), DataLoader(Numbers(6))]

        class Pauses(RecordingModel):
            def on_before_zero_grad(self, optimizer):
                time.sleep(pause)

            def on_validation_batch_end(self, *_):
                time.sleep(pause)

        limits = {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 1}
        model = fit(Data(), model=Pauses, max_epochs=3, **limits)
        return model.seen, model.losses, model.others, torch.rand(())

    want = run(LightningDataModule, 0.0)
    assert run(PrefetchDataModule, 0.0) == want
    assert run(PrefetchDataModule, 0.02) == want


def test_a_loader_that_outlives_its_trainer_prefetches_to_its_end():
    data = gives(DataLoader(Numbers(64), 4))
    # Its step draws no random numbers, beside which no thread would load.
    fit(data, model=Unseeing, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    loader = data.trainer.train_dataloader
    iterator = iter(loader)
    first = [next(iterator) for _ in range(4)]
    wait_until(iterator.ready)
    assert len(first + list(iterator)) == 16
    for copied in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(list(copied)) == 16
    data.trainer = None
    del data
    gc.collect()
    assert len(list(loader)) == 16


def test_setting_the_trainer_again_adds_the_prefetch_callback_once():
    data, trainer = gives(DataLoader(Numbers(8), 4)), SimpleNamespace(callbacks=["own"])
    for _ in range(2):
        data.trainer = trainer
    assert [type(each).__name__ for each in trainer.callbacks] == ["_OfDataModule", "str"]
