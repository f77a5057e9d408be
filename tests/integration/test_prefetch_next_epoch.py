"""PrefetchNextEpoch under a real Trainer: the same training with no wait at an epoch's start, and nothing left."""

import itertools
import time
import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_turbo import PrefetchDataModule, PrefetchNextEpoch
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from tests.leftovers import nothing_is_left

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*validation_step. but have no .val_dataloader"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Numbers(Dataset):
    """Notes which samples were asked for, and when."""

    def __init__(self, length=24):
        self.data = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
        self.asked = []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.data[index], index


class Streamed(IterableDataset):
    def __iter__(self):
        return (Numbers()[index] for index in range(24))


class Model(LightningModule):
    """Notes what it saw; with dropout it draws from the generator that the order of the samples comes from."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.seen, self.losses = [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        if batch_idx == 0:
            self.seen.append([])
        self.seen[-1].append(batch[1].tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean(), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(PrefetchDataModule):
    def __init__(self, dataset=None, validate=False, cls=DataLoader, **settings):
        super().__init__()
        self.dataset, self.cls, self.settings = dataset or Numbers(), cls, {"shuffle": True, **settings}
        if validate:
            self.val_dataloader = lambda: DataLoader(Numbers(8), batch_size=4)

    def train_dataloader(self):
        return self.cls(self.dataset, batch_size=4, **self.settings)


def trainer(*callbacks, **settings):
    return Trainer(**{
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu",
        "enable_model_summary": False, "max_epochs": 3, "callbacks": list(callbacks), **settings,
    })  # fmt: skip


def fit(datamodule, *callbacks, dropout=0.5, seed=0, ckpt_path=None, **settings):
    torch.manual_seed(seed)
    model = Model(dropout)
    trainer(*callbacks, **settings).fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    nothing_is_left()
    return model


WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize(("workers", "strategy"), [(WORKERS[0], "turbo"), (WORKERS[1], "auto"), (WORKERS[2], "turbo")])
def test_training_is_the_same_where_nothing_draws_in_between(workers, strategy):
    plain = fit(Data(**workers), dropout=0.0, strategy=strategy)
    early = fit(Data(**workers), PrefetchNextEpoch(), dropout=0.0, strategy=strategy)
    assert early.seen == plain.seen
    assert early.losses == plain.losses
    assert len({tuple(map(tuple, epoch)) for epoch in early.seen}) == 3


@pytest.mark.parametrize("workers", WORKERS[::2])
def test_with_dropout_and_validation_a_seed_gives_one_result(workers):
    first, second = (fit(Data(validate=True, **workers), PrefetchNextEpoch()) for _ in range(2))
    assert first.seen == second.seen
    assert first.losses == second.losses
    for epoch in first.seen:
        assert sorted(itertools.chain(*epoch)) == list(range(24))


@pytest.mark.parametrize("strategy", ["auto", "turbo"])
def test_loading_goes_on_before_validation(strategy):
    asked = []

    class Look(Callback):
        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking and trainer.current_epoch < 2:
                deadline = time.monotonic() + 20
                while len(data.dataset.asked) <= 24 * (trainer.current_epoch + 1):
                    assert time.monotonic() < deadline
                    time.sleep(0.005)
            asked.append(len(data.dataset.asked))

    data = Data(validate=True)
    fit(data, PrefetchNextEpoch(), Look(), strategy=strategy)
    assert asked[0] == 0
    assert 24 < asked[1] <= 48 < asked[2] <= 72
    assert asked[3] == 72  # after the last epoch none is begun
    assert len(data.dataset.asked) == 72


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": -1, "max_steps": 12},
        {"limit_train_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1},
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5},
        {"accumulate_grad_batches": 4},
        {"val_check_interval": 2},
        {"overfit_batches": 2},
        {"strategy": "turbo", "limit_train_batches": 3},
    ],
)
@pytest.mark.parametrize("workers", WORKERS[:1])
@pytest.mark.filterwarnings("ignore:.*You requested to overfit")
def test_flags_of_the_trainer(settings, workers):
    plain = fit(Data(shuffle=False, validate=True, **workers), dropout=0.0, **settings)
    early = fit(Data(shuffle=False, validate=True, **workers), PrefetchNextEpoch(), dropout=0.0, **settings)
    assert early.seen == plain.seen
    assert early.losses == plain.losses


def _stop(at):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == at:
                trainer.should_stop = True

    return Stop()


def _fail(kind):
    class Fail(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise kind("here")

    return Fail()


@pytest.mark.parametrize("workers", WORKERS[::2])
def test_stopping_early_leaves_nothing(workers):
    fit(Data(**workers), PrefetchNextEpoch(), _stop(6))
    stopper = EarlyStopping("val", patience=1, min_delta=100.0)
    fit(Data(validate=True, **workers), PrefetchNextEpoch(), stopper, max_epochs=50)
    assert stopper.stopped_epoch == 1


@pytest.mark.parametrize(("kind", "workers"), [(ValueError, WORKERS[0]), (KeyboardInterrupt, WORKERS[2])])
def test_an_exception_after_the_last_step_leaves_nothing(workers, kind):
    data = Data(**workers)
    with pytest.raises((ValueError, SystemExit, KeyboardInterrupt)):
        fit(data, PrefetchNextEpoch(), _fail(kind))
    nothing_is_left()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_before_the_first_step_leaves_nothing(kind):
    class Fail(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                self.trainer = trainer  # as a program does that looks at it afterwards
                raise kind

    fail = Fail()
    with pytest.raises((ValueError, SystemExit, KeyboardInterrupt)):
        fit(Data(Numbers(96), num_workers=1), PrefetchNextEpoch(), fail)
    assert fail.trainer.current_epoch == 1
    nothing_is_left()


class Keep(Callback):
    """Saves each epoch with the process-wide generator, as a run that is to go on bit for bit has to."""

    def __init__(self, folder, at_last_step=False):
        self.folder, self.at_last_step, self.state = folder, at_last_step, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.at_last_step and trainer.is_last_batch:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        if not self.at_last_step:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["torch_rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.state = checkpoint["torch_rng"]

    def on_train_start(self, trainer, pl_module):
        if self.state is not None:
            torch.set_rng_state(self.state)


@pytest.mark.parametrize(
    ("workers", "at_last_step", "strategy"),
    [
        (WORKERS[0], False, "auto"),
        (WORKERS[0], True, "turbo"),
        (WORKERS[1], True, "auto"),
        (WORKERS[2], False, "turbo"),
    ],
)
def test_going_on_after_an_epoch_equals_never_having_stopped(workers, at_last_step, strategy, tmp_path):
    # Lightning itself does not validate when it goes on from an epoch's last step.
    def run(**settings):
        callbacks = PrefetchNextEpoch(), Keep(tmp_path, at_last_step)
        data = Data(validate=not at_last_step, **workers)
        return fit(data, *callbacks, max_epochs=4, strategy=strategy, **settings)

    whole = run()
    rest = run(seed=5, ckpt_path=tmp_path / "1.ckpt")
    assert rest.seen == whole.seen[2:]
    assert rest.losses == whole.losses[12:]


@pytest.mark.parametrize("workers", WORKERS[:1])
def test_going_on_with_the_order_of_a_distributed_sampler(workers, tmp_path):
    def run(**settings):
        data = Data(shuffle=False, sampler=DistributedSampler(range(24), 2, 1), **workers)
        return fit(data, PrefetchNextEpoch(), Keep(tmp_path), max_epochs=4, **settings)

    whole = run()
    assert (
        whole.seen
        == fit(Data(shuffle=False, sampler=DistributedSampler(range(24), 2, 1), **workers), max_epochs=4).seen
    )
    rest = run(seed=5, ckpt_path=tmp_path / "1.ckpt")
    assert rest.seen == whole.seen[2:]
    assert rest.losses == whole.losses[6:]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: {"train_dataloaders": DataLoader(Numbers(), batch_size=4)}, id="plain"),
        pytest.param(lambda: {"datamodule": Data(Streamed(), shuffle=None)}, id="stream"),
    ],
)
def test_where_nothing_can_begin_early_it_is_said_once(data):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(PrefetchNextEpoch(), max_epochs=4).fit(Model(), **data())
    texts = [str(each.message) for each in told if issubclass(each.category, NoEffectWarning)]
    assert len([text for text in texts if "no training loader can begin an epoch early" in text]) == 1


def test_several_loaders():
    class Two(Data):
        def train_dataloader(self):
            return {"a": DataLoader(Numbers(), batch_size=4, shuffle=True), "b": DataLoader(Numbers(12), batch_size=4)}

    class Reads(Model):
        def training_step(self, batch, batch_idx):
            assert batch["b"][1].tolist() == [4 * (batch_idx % 3) + k for k in range(4)]
            return super().training_step(batch["a"], batch_idx)

    def run():
        torch.manual_seed(0)
        model = Reads()
        trainer(PrefetchNextEpoch()).fit(model, datamodule=Two())
        nothing_is_left()
        return model

    first = run()
    assert all(sorted(itertools.chain(*epoch)) == list(range(24)) for epoch in first.seen)
    assert first.losses == run().losses


def test_a_checkpoint_of_other_loaders_says_that_orders_are_drawn_anew(tmp_path):
    class Two(Data):
        def train_dataloader(self):
            return [DataLoader(Numbers(), batch_size=4), DataLoader(Numbers(), batch_size=4)]

    class Reads(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    fit(Data(), PrefetchNextEpoch(), Keep(tmp_path))
    with pytest.warns(TurboWarning, match="for 1 training loaders, and this run has 2"):
        trainer(PrefetchNextEpoch(), Keep(tmp_path)).fit(Reads(), datamodule=Two(), ckpt_path=tmp_path / "0.ckpt")
    nothing_is_left()
