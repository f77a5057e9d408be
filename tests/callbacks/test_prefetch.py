"""``Prefetch``: callbacks that iterate a loader during a run, combinations with a DataModule, arguments."""

import gc

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_turbo import DALILoader, Prefetch, PrefetchDataModule, PrefetchLoader
from lightning_turbo.data import DeviceTransfer
from lightning_turbo.errors import NoEffectWarning
from tests.data.samples import seeded
from tests.integration.recording import Numbers, RecordingModel, fit, gives
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*validation_step. but have no .val_dataloader"),
]


class Peek(Callback):
    """Iterates a loader in one hook, as a callback that logs images does."""

    def __init__(self, hook, loader="train_dataloader"):
        self.found, self.calls = [], 0

        def peek(trainer, *_):
            self.calls += 1
            batches = iter(getattr(trainer, loader))
            self.found += [next(batches)[1].tolist(), next(batches)[1].tolist()]

        setattr(self, hook, peek)


class PeeksInStep(RecordingModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            next(iter(self.trainer.train_dataloader))
        return super().training_step(batch, batch_idx)


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), 4),
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "own generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=seeded(1)),
    "workers": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=1),
    "ours": lambda: PrefetchLoader(Numbers(), 4, shuffle=True, threads=2),
}
HOOKS = ["on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"]


@pytest.mark.parametrize("strategy", ["auto", "turbo"])
@pytest.mark.parametrize("hook", [*HOOKS, "on_validation_epoch_end"])
def test_a_callback_that_iterates_a_loader_does_not_end_the_run(hook, strategy):
    runs = []
    for callbacks, chosen in (([], "auto"), ([Prefetch()], strategy)):
        peek, loader = Peek(hook), LOADERS["shuffled"]()
        validation = DataLoader(Numbers(8), 4)
        model = fit(loader, *callbacks, peek, validation=validation, strategy=chosen, num_sanity_val_steps=0)
        runs.append((peek.found, peek.calls, model.seen, model.losses, model.others))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_run_continues_while_a_callback_iterates_its_loader(make):
    straight, ours = Peek("on_train_batch_end"), Peek("on_train_batch_end")
    plain = fit(make() if not isinstance(make(), PrefetchLoader) else LOADERS["shuffled"](), straight)
    assert fit(make(), Prefetch(), ours).seen == plain.seen
    assert ours.found == straight.found


def test_persistent_workers_continue_while_a_callback_iterates_their_loader():
    """A plain DataLoader with persistent workers has one iterator, which restarts for the callback and ends the run."""

    def make():
        return DataLoader(Numbers(), 4, shuffle=True, num_workers=1, persistent_workers=True)

    plain = fit(make(), max_epochs=1)
    assert fit(make(), Prefetch(), Peek("on_train_batch_end"), max_epochs=1).seen == plain.seen


def test_training_and_validation_steps_may_iterate_a_loader():
    plain = fit(LOADERS["shuffled"](), model=PeeksInStep)
    assert fit(LOADERS["shuffled"](), Prefetch(), model=PeeksInStep).seen == plain.seen
    runs = []
    for callbacks in ([], [Prefetch()]):
        peek = Peek("on_validation_batch_end", "val_dataloaders")
        model = fit(LOADERS["in order"](), *callbacks, peek, validation=DataLoader(Numbers(12), 4))
        runs.append((peek.found, model.others))
    assert runs[0] == runs[1]


def test_a_callback_may_iterate_one_of_several_loaders():
    class Both(RecordingModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    class First(Callback):
        def on_train_batch_end(self, trainer, *_):
            next(iter(trainer.train_dataloader["a"]))

    def run(*callbacks):
        loaders = {"a": LOADERS["shuffled"](), "b": DataLoader(Numbers(8), 4)}  # this loader restarts within the epoch
        return fit(CombinedLoader(loaders, "max_size_cycle"), *callbacks, First(), model=Both).seen

    assert run(Prefetch()) == run()


def test_an_epoch_that_ended_early_is_followed_by_a_complete_one():
    """The next epoch belongs to the Trainer, although the previous iterator was not exhausted."""

    class Skips(RecordingModel):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    plain = fit(LOADERS["shuffled"](), model=Skips, max_epochs=3)
    ours = fit(LOADERS["shuffled"](), Prefetch(), model=Skips, max_epochs=3)
    assert ours.seen == plain.seen


# Settings


def made(datamodule, *callbacks):
    """Return the loader that a run iterated."""
    return fit(datamodule, *callbacks, limit_val_batches=0, max_epochs=1).trainer.train_dataloader


BOTH = {
    "two callbacks": lambda: (DataLoader(Numbers(), 4), Prefetch(), Prefetch(threads=2)),
    "a callback and a DataModule": lambda: (gives(DataLoader(Numbers(), 4), threads=2), Prefetch()),
}


@pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)
def test_two_prefetch_in_one_trainer_are_an_error(make):
    with pytest.raises(
        MisconfigurationException, match="Prefetch: expected one for all loaders of a Trainer, got several"
    ):
        fit(*make())


def test_prefetch_of_a_callback_and_of_a_datamodule_have_the_same_settings():
    for loader in (
        made(gives(DataLoader(Numbers(), 4), threads=2, prefetch_batches=3)),
        made(gives(DataLoader(Numbers(), 4), LightningDataModule), Prefetch(threads=2, prefetch_batches=3)),
    ):
        assert (loader.threads, loader.prefetch_batches) == (2, 3)


@pytest.mark.filterwarnings("ignore:sample_seeds seeds")
def test_prefetch_of_a_callback_and_of_a_datamodule_seed_samples_alike():
    class Drawing(Numbers):
        def __getitem__(self, index):
            return torch.rand(4), index

    def losses(base, *callbacks, **settings):
        data = gives(DataLoader(Drawing(), 4), base, **settings)
        return fit(data, *callbacks, limit_val_batches=0).losses

    ours = losses(PrefetchDataModule, sample_seeds=1)
    assert ours == losses(LightningDataModule, Prefetch(sample_seeds=1))
    assert ours != losses(LightningDataModule, Prefetch(sample_seeds=2))


def test_a_loader_may_be_deleted_before_the_run_ends():
    """As a loader that was replaced after some epochs."""
    callback, trainer = Prefetch(threads=2), quiet_trainer()
    first, second = (PrefetchLoader(Numbers(), 4) for _ in range(2))
    transfer = DeviceTransfer(torch.device("cpu"))
    for loader in (first, second):
        assert callback._wrap(trainer, transfer, loader) is loader
        assert loader.transfer is transfer
    del loader, first
    gc.collect()
    callback._end()
    assert second.transfer is None


def test_a_dali_loader_is_not_wrapped_and_other_iterables_warn(recwarn):
    callback = Prefetch()
    callback._tell_of_foreign(object.__new__(DALILoader))
    assert not recwarn
    with pytest.warns(NoEffectWarning, match="Prefetching has no effect on a list, which is not a DataLoader"):
        callback._tell_of_foreign([1])
