"""A run that breaks off in the validation at an epoch's end finishes that validation when it is resumed."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import ExactResume, PrefetchLoader
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning 2.6 finishes a validation that broke off"),
]
BATCHES = 4


class Stop(Exception):
    """Ends a run."""


class SaveOnException(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


class Rows(Dataset):
    """Eight samples, one of which cannot be read at first."""

    broken = None

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        if index == self.broken:
            raise Stop
        return torch.full((4,), float(index))


class Net(pl.LightningModule):
    def __init__(self, fails="", at=0, epoch=0):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.fails, self.at, self.epoch = fails, at, epoch
        self.trained, self.validated = [], []

    def fail(self, where, index):
        if (where, index, self.trainer.current_epoch) == (self.fails, self.at, self.epoch):
            raise Stop

    def training_step(self, batch, index):
        self.trained.append((self.trainer.current_epoch, index))
        return self.net(batch).square().mean()

    def validation_step(self, batch, index, dataloader_idx=0):
        self.fail("validation_step", index)
        self.validated.append((self.trainer.current_epoch, dataloader_idx, index))

    def on_validation_batch_end(self, outputs, batch, index, dataloader_idx=0):
        self.fail("on_validation_batch_end", index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(net, folder, strategy="auto", callbacks=(), loader=DataLoader, ckpt=None, broken=None, **settings):
    rows, tested = Rows(), Rows()
    tested.broken = broken
    trainer = quiet_trainer(
        strategy=strategy, num_sanity_val_steps=0, callbacks=[SaveOnException(folder / "x.ckpt"), *callbacks],
        **{"max_epochs": 2, **settings},
    )  # fmt: skip
    trainer.fit(net, loader(rows, 2), DataLoader(tested, 2), ckpt_path=ckpt, **unpickling(False if ckpt else None))
    return trainer


def break_off_and_resume(folder, fails, at, epoch, **how):
    broken = 2 * at if fails == "dataset" and epoch == 0 else None
    net = Net(fails, at, epoch)
    with pytest.raises(Stop):
        fit(net, folder, broken=broken, **how)
    rest = Net()
    trainer = fit(rest, folder, ckpt=folder / "x.ckpt", **how)
    return net, rest, trainer


HOW = {
    "turbo": {"strategy": "turbo"},
    "callback": {"callbacks": (ExactResume(),)},
    "prefetching": {"strategy": "turbo", "loader": PrefetchLoader},
    "steps": {"strategy": "turbo", "max_steps": 100},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("fails", "at", "epoch", "left"), [
    ("validation_step", 0, 0, 4), ("validation_step", 2, 0, 2), ("validation_step", 3, 1, 1),
    ("on_validation_batch_end", 1, 0, 3), ("dataset", 2, 0, 2),
])  # fmt: skip
def test_the_validation_is_finished_and_the_training_goes_on_behind_it(how, fails, at, epoch, left, tmp_path):
    net, rest, trainer = break_off_and_resume(tmp_path, fails, at, epoch, **HOW[how])
    assert net.trained + rest.trained == [(e, i) for e in (0, 1) for i in range(BATCHES)]
    assert [e for e, _, _ in rest.validated] == [epoch] * left + [1] * (BATCHES if epoch == 0 else 0)
    assert trainer.global_step == 2 * BATCHES


@pytest.mark.parametrize("how", ["prefetching", "steps"])
@pytest.mark.parametrize(("fails", "at", "left"), [
    ("validation_step", 2, 2), ("on_validation_batch_end", 1, 3), ("on_validation_batch_end", 3, 1), ("dataset", 2, 2),
])  # fmt: skip
def test_a_validation_in_the_middle_of_an_epoch_is_finished(how, fails, at, left, tmp_path):
    net, rest, trainer = break_off_and_resume(
        tmp_path, fails, at, 0, **{**HOW[how], "loader": PrefetchLoader}, val_check_interval=2
    )
    assert net.trained == [(0, 0), (0, 1)]
    assert rest.trained == [(0, 2), (0, 3), *((1, index) for index in range(BATCHES))]
    assert [epoch for epoch, _, _ in rest.validated] == [0] * (left + BATCHES) + [1] * 2 * BATCHES
    assert trainer.global_step == 2 * BATCHES


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_the_validation_is_finished_after_an_epoch_of_other_batches(batch_size, tmp_path):
    how = {"callbacks": (ExactResume(),)}
    with pytest.raises(Stop):
        fit(Net("validation_step", 2, 0), tmp_path, loader=PrefetchLoader, **how)
    rest = Net()
    ckpt = tmp_path / "x.ckpt"
    trainer = fit(rest, tmp_path, loader=lambda rows, _: PrefetchLoader(rows, batch_size), ckpt=ckpt, **how)
    assert rest.trained == [(1, i) for i in range(2 * BATCHES // batch_size)]
    assert [epoch for epoch, _, _ in rest.validated] == [0, 0, 1, 1, 1, 1]
    assert trainer.global_step == BATCHES + len(rest.trained)


def test_lightning_itself_finishes_as_many_batches(tmp_path):
    _, rest, _ = break_off_and_resume(tmp_path, "validation_step", 2, 1)
    assert [e for e, _, _ in rest.validated] == [1, 1]
