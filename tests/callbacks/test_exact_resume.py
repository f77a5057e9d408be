"""Checkpoints of ``ExactResume``: the state of validation loaders, and what is left to Lightning."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lightning_turbo import ExactResume, Prefetch, PrefetchLoader
from lightning_turbo.callbacks.resume import loaders, random_states, resharded, schedulers
from lightning_turbo.data.loading.epoch_state import EpochState, StreamPlace
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


def drawing(number):
    """Return a loader with a given number of generators: one of its own, and those of its sampler."""
    generators = [torch.Generator().manual_seed(each) for each in range(number)]
    data = Rows(8, noisy)
    sampler = RandomSampler(data, generator=generators[1]) if number == 2 else None
    return PrefetchLoader(data, 4, sampler=sampler, shuffle=sampler is None, generator=generators[0])


def order(loader):
    return [batch[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize(("saved", "now"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_a_reloaded_loader_continues_the_generators_if_their_number_is_the_same(saved, now):
    before, fresh = drawing(saved), order(drawing(now))
    whole = [order(before) for _ in range(2)]
    after = DataLoader(Rows(8, noisy), 4), drawing(now)
    loaders._set_generators_of_new_loaders(SimpleNamespace(flattened=after), [state_after(saved)])
    assert order(after[1]) == (whole[1] if saved == now else fresh)


def state_after(number):
    """Return the state of such a loader after its first epoch."""
    loader = drawing(number)
    order(loader)
    return loader.state_dict()


@pytest.mark.parametrize("held", [1, 0, 2])
def test_a_loader_without_a_position_gets_the_states_of_its_generators(held):
    loader = DataLoader(Rows(8, noisy), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    (states,) = loaders.states_of_generators(SimpleNamespace(flattened=[loader]))
    before = order(loader)
    loaders._set_generators(SimpleNamespace(flattened=[loader]), [(states * 2)[:held]])
    assert (order(loader) == before) is (held == 1)


def test_an_error_in_train_dataloader_reaches_the_user():
    class Loop:
        _combined_loader = None

        def setup_data(self):
            raise ValueError("no such folder")

        def _load_combined_loader_states(self):
            raise AssertionError("there are no loaders")

    loop = Loop()
    replaced = loaders.set_aside(loop)
    with pytest.raises(ValueError, match="no such folder"):
        loop.setup_data()
    for each in replaced:
        each.put_back()
    assert vars(loop) == {}


def test_after_an_error_on_another_rank_the_last_monitored_value_is_saved(monkeypatch):
    """Computing the current value would wait for the other ranks."""

    class Alone:
        lr_scheduler_configs = (SimpleNamespace(reduce_on_plateau=True, monitor="loss"),)
        _logger_connector = SimpleNamespace(_callback_metrics={"loss": torch.tensor(2.0), "other": torch.tensor(1.0)})

        @property
        def callback_metrics(self):
            raise AssertionError("waits for ever")

    monkeypatch.setattr(schedulers, "rank_and_size", lambda: (0, 2))
    try:
        raise KeyError("of this rank")
    except KeyError:
        assert schedulers.monitored(Alone()) == {"loss": torch.tensor(2.0)}


@pytest.mark.parametrize(("state", "calls"), [
    ({"cuda": "its own"}, [("state", "its own")]), ({"seed": 5}, [("seed", 5)]), ({}, []),
])  # fmt: skip
def test_the_generator_of_a_device_gets_its_saved_state_or_that_of_a_new_rank(state, calls, monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda own, device: called.append(("state", own)))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: called.append(("seed", seed)))
    numbers = torch.get_rng_state()
    torch.rand(1)
    random_states.set_random_states(torch.device("cuda", 0), {"torch": numbers, **state})
    assert called == calls
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize(("state", "used"), [
    (EpochState(consumed=3), (12, 6)),  # the order is unknown, so batches are counted
    (EpochState(consumed=3, stream=StreamPlace("Rows", 4, 1, 8, 2)), (12, 12)),  # two of 4 before, one after the change
    (EpochState(consumed=0), None), (EpochState(consumed=3, over=True), None),
])  # fmt: skip
def test_the_number_of_samples_used_by_ranks_without_a_known_order(state, used):
    restored = SimpleNamespace(ranks=2)
    assert resharded._count_samples(state, restored, was=4, now=2) == used


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
