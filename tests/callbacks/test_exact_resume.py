"""What a checkpoint of ``ExactResume`` holds of validation loaders, and what it leaves to Lightning."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_turbo import ExactResume, Prefetch, PrefetchLoader
from tests.data.samples import Rows
from tests.integration.noting import Save
from tests.trainers import quiet_trainer
from tests.versions import unpickling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:sample_seeds seeds:lightning_turbo.errors.NoEffectWarning"),
]


def noisy(index):
    return torch.cat([torch.full((1,), float(index)), torch.rand(3)])


class Net(pl.LightningModule):
    """Notes the random numbers of each validation sample, by the epoch and the sample."""

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
def test_seeds_of_validation_samples_follow_from_the_epoch_after_a_resume_too(workers, settings, tmp_path):
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


def test_passes_are_counted_by_the_loader_where_there_is_no_trainer():
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
def test_a_prediction_knows_the_indices_of_its_batches(number, workers):
    def predict(*callbacks):
        writer = Writer()
        trainer = quiet_trainer(callbacks=[*callbacks, writer])
        loaders = [DataLoader(torch.zeros(6 + each, 32), 2, num_workers=workers) for each in range(number)]
        trainer.predict(BoringModel(), loaders, return_predictions=False)
        return writer.seen

    assert predict(Prefetch(sample_seeds=1)) == predict(Prefetch()) == predict()


class Half(DataLoader):
    """Has one of the two methods of a loader with a state."""

    def load_state_dict(self, state):
        raise AssertionError(f"{state} is of another loader")


def test_a_loader_that_gives_no_state_is_one_without(tmp_path):
    def loaders():
        return [Half(Rows(8, noisy), 4, shuffle=True), DataLoader(Rows(8, noisy), 4)]

    save = Save(tmp_path / "at.ckpt", 4, "on_train_epoch_end")
    whole, _ = fit(ExactResume(), save, loaders=loaders())
    rest, _ = fit(ExactResume(), loaders=loaders(), ckpt=tmp_path / "at.ckpt")
    assert rest.trained == whole.trained[4:]
    assert rest.trained


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
def test_a_checkpoint_goes_on_with_and_without_prefetch(kind, saved_with, resumed_with, tmp_path):
    """Exactly with it, and from the beginning of the epoch without, as a plain checkpoint does."""

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
