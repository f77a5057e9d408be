"""PrefetchDataModule under a real Trainer: the same training, and nothing left behind."""

import functools
import pickle
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_turbo import Normalize, PrefetchDataModule, PrefetchLoader, tune_workers
from lightning_turbo.datamodules import prefetch
from lightning_turbo.errors import NoEffectWarning
from tests.leftovers import nothing_is_left
from tests.versions import unpickling

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*You requested to overfit"),
    pytest.mark.filterwarnings("ignore:.*training_step. returned .None"),
    pytest.mark.filterwarnings("ignore:.*validation_step. but have no .val_dataloader"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*predict_dataloader.*:UserWarning"),
]


class Numbers(Dataset):
    def __init__(self, length=24):
        self.data = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], index


class Model(LightningModule):
    """Notes which samples it saw, and has dropout, so that shared random state would show."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        self.seen, self.losses, self.others = [], [], []

    def loss(self, batch):
        if isinstance(batch, dict):
            batch = batch["a"]
        return self.net(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen.append((batch["a"] if isinstance(batch, dict) else batch)[1].tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.others.append(("val", dataloader_idx, batch[1].tolist()))

    def test_step(self, batch, batch_idx):
        self.others.append(("test", batch[1].tolist()))

    def predict_step(self, batch, batch_idx):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


def trainer(**settings):
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 2,
    }  # fmt: skip
    return Trainer(**{**quiet, **settings})


def fit(datamodule, **settings):
    torch.manual_seed(0)
    model = Model()
    trainer(**settings).fit(model, datamodule=datamodule)
    nothing_is_left()
    return model


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


class Stops(Model):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.how(self.trainer)
        return super().training_step(batch, batch_idx)


def should_stop(trainer):
    trainer.should_stop = True


def fails(trainer):
    raise ValueError("in the step")


def interrupted(trainer):
    raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "error"), [(should_stop, None), (fails, ValueError), (interrupted, (KeyboardInterrupt, SystemExit))]
)
def test_a_fit_that_ends_early_leaves_nothing(workers, how, error):
    model = Stops(how)
    one = trainer()
    if error is None:
        one.fit(model, datamodule=Mine(num_workers=workers))
    else:
        with pytest.raises(error):
            one.fit(model, datamodule=Mine(num_workers=workers))
    nothing_is_left()


def test_fit_twice_then_test_and_predict():
    datamodule, model = Mine(), Model()
    one = trainer(max_epochs=1)
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


def test_it_can_be_inherited_alone():
    class Alone(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(), 4, shuffle=True)

    plain = fit(Theirs(), limit_val_batches=0).losses
    assert fit(Alone(prefetch_batches=2)).losses == fit(Alone(threads=3)).losses == plain
    loader = Alone(prefetch_batches=2).train_dataloader()
    assert isinstance(loader, PrefetchLoader)
    assert loader.prefetch_batches == 2


@pytest.mark.parametrize("structure", ["list", "dict", "nested", "combined", "defaultdict"])
def test_structures_of_loaders(structure):
    def loaders(cls):
        a, b = DataLoader(Numbers(), 4), DataLoader(Numbers(8), 4)
        made = {"list": [a, b], "dict": {"a": a, "b": b}, "nested": {"a": a, "b": [b, (a,)]}}
        made["combined"] = CombinedLoader(dict(made["dict"]), "max_size")
        made["defaultdict"] = defaultdict(list, made["dict"])
        value = made[structure]

        class Module(cls):
            def train_dataloader(self):
                return value

        return Module(), value

    def leaves(value):
        if isinstance(value, CombinedLoader):
            return value.flattened
        if isinstance(value, dict):
            value = list(value.values())
        return [leaf for part in value for leaf in leaves(part)] if isinstance(value, (list, tuple)) else [value]

    ours, theirs = loaders(PrefetchDataModule)
    got = ours.train_dataloader()
    assert type(got) is type(theirs)
    assert all(isinstance(leaf, PrefetchLoader) for leaf in leaves(got))
    assert not any(isinstance(leaf, PrefetchLoader) for leaf in leaves(theirs))  # the user's own are left alone

    class Sees(Model):
        def training_step(self, batch, batch_idx):
            self.seen.append(str(batch))

    runs = []
    for datamodule in (ours, loaders(LightningDataModule)[0]):
        model = Sees()
        trainer(max_epochs=1).fit(model, datamodule=datamodule)
        runs.append(model.seen)
    assert runs[0] == runs[1]
    nothing_is_left()


def test_other_iterables_are_handed_on():
    class Other(PrefetchDataModule):
        def train_dataloader(self):
            return [self.own, 3]

        own = range(3)

    assert Other().train_dataloader() == [range(3), 3]


def test_loaders_that_are_not_defined_stay_undefined():
    class TrainOnly(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(), 4)

    model = fit(TrainOnly())
    assert model.others == []  # Lightning did not ask for validation loaders
    with pytest.raises(MisconfigurationException, match="test_dataloader"):
        trainer().test(Model(), datamodule=TrainOnly(), verbose=False)


def test_methods_that_are_set_on_the_object():
    datamodule = Mine()
    datamodule.train_dataloader = lambda: DataLoader(Numbers(8), 4)
    assert isinstance(datamodule.train_dataloader(), PrefetchLoader)
    assert len(fit(datamodule).seen) == 4


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_from_datasets():
    datamodule = PrefetchDataModule.from_datasets(Numbers(), batch_size=4, prefetch_batches=3)
    assert isinstance(loader := datamodule.train_dataloader(), PrefetchLoader)
    assert (loader.batch_size, loader.prefetch_batches) == (4, 3)
    assert len(fit(datamodule).seen) == 12


def test_device_transform():
    class Images(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(torch.full((8, 1, 2, 2), 255, dtype=torch.uint8), 4)

    class Sees(Model):
        def training_step(self, batch, batch_idx):
            assert batch.dtype == torch.float32
            assert batch.unique().tolist() == pytest.approx([1.0])
            self.seen.append(batch_idx)

    model = Sees()
    trainer(max_epochs=1).fit(model, datamodule=Images(device_transform=Normalize(0.5, 0.5)))
    assert model.seen == [0, 1]

    class Hooked(Sees):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

    with pytest.raises(MisconfigurationException, match=r"Hooked.on_before_batch_transfer is overridden. Call it in"):
        trainer().fit(Hooked(), datamodule=Images(device_transform=Normalize(0.5, 0.5)))


def test_device_prefetch_is_set_aside_with_a_warning_where_hooks_must_see_each_batch(monkeypatch):
    """The choice alone: a strategy that says it works on a CUDA device is pretended."""

    class Hooked(Model):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    class Strategy:
        root_device = torch.device("cuda", 0)

    class Pretended:
        strategy = Strategy()
        lightning_module = Hooked()

        def __init__(self):
            self.callbacks = []

    datamodule = Mine()
    monkeypatch.setattr(datamodule, "trainer", Pretended(), raising=False)
    with pytest.warns(NoEffectWarning, match=r"has no effect, because Hooked.transfer_batch_to_device is overridden"):
        loader = datamodule.train_dataloader()
    assert loader.transfer is None
    alone = Mine(device_prefetch=False)
    alone.trainer = Pretended()
    assert alone.train_dataloader().transfer is None
    Strategy.device_prefetch = True
    Pretended.lightning_module = Model()
    assert datamodule.train_dataloader().transfer is None


def test_auto_workers(capsys):
    datamodule = Mine(auto_workers=True)
    first = datamodule.train_dataloader()
    table = capsys.readouterr().out
    assert "workers  batches" in table
    assert datamodule.train_dataloader().num_workers == first.num_workers
    assert capsys.readouterr().out == ""  # measured once
    nothing_is_left()


class Unmeasurable(Dataset):
    def __init__(self, length, pause=0.0, error=None):
        self.length, self.pause, self.error = length, pause, error

    def __len__(self):
        return self.length

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

    class Data(PrefetchDataModule):
        def val_dataloader(self):
            return DataLoader(dataset, batch_size=1)

    datamodule = Data(auto_workers=True)
    told = f"leaves a loader of val_dataloader as it is, with num_workers=0: .*{why}"
    with pytest.warns(NoEffectWarning, match=told):
        loader = datamodule.val_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (0, None, False)
    if dataset.error is None:
        assert len(list(datamodule.val_dataloader())) == dataset.length  # and is not measured again
    else:
        with pytest.raises(OSError, match="bad disk"):
            next(iter(loader))
    nothing_is_left()


class Undivided(IterableDataset):
    def __iter__(self):
        yield from range(8)


class Opens(Unmeasurable):
    """Holds something that belongs to one process."""

    def __init__(self, thing):
        super().__init__(8)
        self.thing = {"inside": [thing]}


KEPT = {
    "a stream": (Undivided, "is an IterableDataset"),
    "an open file": (lambda: Opens(open(__file__, "rb")), "processes cannot share"),  # noqa: SIM115
    "a connection": (lambda: Opens(sqlite3.connect(":memory:")), "processes cannot share"),
    "half of it": (lambda: Subset(Opens(threading.Lock()), range(4)), "processes cannot share"),
}


@pytest.mark.parametrize(("make", "why"), KEPT.values(), ids=KEPT)
def test_auto_workers_keep_0_workers_where_processes_could_load_other_data(make, why):
    dataset = make()

    class Data(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(dataset, batch_size=2)

    with pytest.warns(NoEffectWarning, match=f"leaves a loader of train_dataloader as it is, .*{why}"):
        loader = Data(num_workers="auto").train_dataloader()
    assert loader.num_workers == 0
    thing = getattr(dataset, "thing", {"inside": [None]})["inside"][0]
    if hasattr(thing, "close"):
        thing.close()


class Shares(Dataset):
    """As one file that the whole DataModule reads: two threads must not be inside at the same time."""

    def __init__(self, lock):
        self.lock = lock

    def __len__(self):
        return 32

    def __getitem__(self, index):
        assert self.lock.acquire(blocking=False), "two threads read at once"
        time.sleep(0.001)
        self.lock.release()
        return torch.ones(4), index


def test_loaders_of_one_datamodule_load_in_turns_whatever_they_share():
    lock = threading.Lock()

    class Data(PrefetchDataModule):
        def train_dataloader(self):
            return DataLoader(Shares(lock), batch_size=2)

        def val_dataloader(self):
            return DataLoader(Shares(lock), batch_size=2)

    fit(Data(), val_check_interval=4, max_epochs=1)


def test_a_loader_with_prefetching_of_its_own_is_used_as_it_is():
    own = PrefetchLoader(Numbers(), 4, prefetch_batches=2, threads=3)

    class Data(PrefetchDataModule):
        def train_dataloader(self):
            return own

    iterator = iter(own)
    next(iterator)
    own.load_state_dict(own.state_dict())
    loader = Data(prefetch_batches=5).train_dataloader()
    assert loader is own
    assert (loader.prefetch_batches, loader.threads) == (2, 3)
    assert len(list(loader)) == 5  # it goes on from the state that was loaded


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prefetch_batches": 0}, ValueError, r"prefetch_batches: expected an integer of 1 or more, got 0"),
        ({"prefetch_batches": -1}, ValueError, r"prefetch_batches: expected an integer of 1 or more, got -1"),
        ({"threads": 0}, ValueError, r"threads: expected an integer of 1 or more, got 0"),
        ({"threads": True}, TypeError, r"threads: expected an integer of 1 or more, got True"),
        ({"device_prefetch": object()}, TypeError, r"device_prefetch=<object object at .*>: expected"),
        ({"device_prefetch": "cuda"}, TypeError, r"device_prefetch='cuda': expected True or False"),
        ({"device_transform": 1}, TypeError, r"device_transform=1: expected a function or None"),
        ({"auto_workers": "auto"}, TypeError, r"auto_workers='auto': expected True or False"),
        ({"num_workers": 2}, TypeError, r"no argument for num_workers=2; expected are .*, auto_workers, .*, by"),
    ],
)
def test_bad_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        PrefetchDataModule(**arguments)


def test_a_constructor_that_does_not_call_up_is_told():
    class Forgets(PrefetchDataModule):
        def __init__(self):
            self.x = 1

        def train_dataloader(self):
            return DataLoader(Numbers(), 4)

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
def test_a_class_behind_that_saves_its_arguments_finds_what_it_got(cls, given, tmp_path):
    datamodule = cls(**given)
    got = {"batch_size": 4, "num_workers": 0, "pin_memory": False, **given}
    assert {name: datamodule.hparams[name] for name in got} == got
    one = trainer(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    one.fit(Model(), datamodule=datamodule)
    one.save_checkpoint(tmp_path / "one.ckpt")
    again = cls.load_from_checkpoint(tmp_path / "one.ckpt", **unpickling(False))
    assert again.hparams == datamodule.hparams
    assert isinstance(again.train_dataloader(), PrefetchLoader)


def test_arguments_given_by_position_and_of_one_in_front_are_saved():
    class InFront(SavesMine):
        def __init__(self, num_workers=None):
            super().__init__(num_workers=num_workers)

    assert SavesMine(2, 1).hparams["num_workers"] == 1
    assert InFront(1).hparams["num_workers"] == 1
    with pytest.raises(TypeError, match=r"Saves.__init__\(\) got an unexpected keyword argument 'batches'"):
        SavesMine(batches=1)


@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"batch_size": 8}], ids=str)
def test_a_class_behind_finds_what_it_got_under_lightning_cli(given, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train"])
    words = [f"--data.{name}={value}" for name, value in given.items()]
    cli = LightningCLI(Model, SavesMine, run=False, args=words, seed_everything_default=False)
    got = {"batch_size": 4, "num_workers": 0, "pin_memory": False, **given}
    assert {name: cli.datamodule.hparams[name] for name in got} == got
    assert cli.datamodule.train_dataloader().batch_size == got["batch_size"]


RANKS = """
    import sys, threading, torch
    torch.set_num_threads(1)
    sys.path.insert(0, {folder!r})
    import pytest
    from lightning_turbo.data import prefetcher
    from tests.integration.test_prefetch_datamodule import Mine, Model, trainer
    from tests.leftovers import nothing_is_left

    prefetcher.WORTH = 0.0  # the loader gets its threads, fast as it is
    started, start = [], threading.Thread.start

    def noted(thread):
        started.append(type(thread).__name__)
        start(thread)

    threading.Thread.start = noted

    class Notes(Model):
        def on_train_end(self):
            threads = started.count("BackgroundGenerator")
            torch.save((self.seen, self.trainer.global_step, threads), f"rank{{self.trainer.global_rank}}.pt")
            nothing_is_left()

    if __name__ == "__main__":
        torch.manual_seed(0)
        one = trainer(devices=2, strategy="ddp_fork", limit_val_batches=0)
        one.fit(Notes(), datamodule=Mine(num_workers=0))
        nothing_is_left()
"""


@pytest.mark.distributed
@pytest.mark.timeout(170)
def test_two_ranks_share_the_samples(tmp_path):
    from pathlib import Path

    code = textwrap.dedent(RANKS.format(folder=str(Path(__file__).parents[2])))
    (tmp_path / "ranks.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "ranks.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (first, *counts), (second, *other_counts) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert counts == other_counts == [6, 2]  # 24 samples, 2 ranks, batches of 4, 2 epochs; a thread for each
    assert len(first) == len(second) == 6
    orders = []
    for epoch in (slice(0, 3), slice(3, 6)):
        order = [n for batch in first[epoch] + second[epoch] for n in batch]
        assert sorted(order) == list(range(24))
        orders.append(order)
    assert orders[0] != orders[1]
