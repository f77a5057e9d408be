"""Counters, schedules and several loaders of a run that goes on with another batch size in one process."""

import itertools

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import ExactResume, Prefetch, SeededSampler
from lightning_turbo.callbacks.exact_resume import KEY
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Rows, Stream
from tests.integration.anywhere_worker import Net, Stop
from tests.trainers import quiet_trainer
from tests.versions import unpickling

# torchdata calls a function of torch that is on its way out.
pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Noting(Net):
    """Notes what each step saw of each loader, and has a rate that is halved after each epoch."""

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"a": batch}
        seen = {name: [] if part is None else part.tolist() for name, part in parts.items()}
        self.seen.append((self.current_epoch, batch_idx, self.trainer.num_training_batches, seen))
        return self.weight.square()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Validations(Callback):
    def __init__(self):
        self.after = []

    def on_validation_start(self, trainer, module):
        self.after.append(module.seen[-1][:2])


def loader(length, batch_size, drop_last=False):
    data = Rows(length)
    return DataLoader(data, batch_size, sampler=SeededSampler(data, 1), drop_last=drop_last)


def fit(data, *callbacks, ckpt=None, validation=None, **settings):
    model = Noting()
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[*callbacks], **settings)
    if validation is not None:
        model.validation_step = lambda batch, batch_idx: None
    trainer.fit(model, data, validation, ckpt_path=ckpt, **unpickling(True if ckpt else None))
    return model.seen, trainer


def lives(make, sizes, stops, folder, **settings):
    """Batches of runs of these batch sizes, which but for the last stop after so many steps."""
    seen, path = [], None
    for number, (size, stop) in enumerate(itertools.zip_longest(sizes, stops)):
        here = folder / str(number)
        saves = [Stop(here, stop)] if stop else []
        more, trainer = fit(make(size), Prefetch(), *saves, ckpt=path, **settings)
        seen, path = seen + more, here
    return seen, trainer


@pytest.mark.parametrize("sizes", [(4, 2, 3), (3, 5, 1), (2, 4, 4)])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_go_on_together(mode, sizes, tmp_path):
    def make(size):
        return CombinedLoader({"a": loader(29, size), "b": loader(12, size)}, mode)

    seen, _ = lives(make, sizes, (2, 1), tmp_path)
    for epoch in (0, 1):
        steps = [step for step in seen if step[0] == epoch]
        a, b = ([index for *_, parts in steps for index in parts[name]] for name in "ab")
        assert len(set(a)) == len(a)
        assert len(a) == 29 or mode == "min_size"
        assert set(b) == set(range(12))
        assert len(b) == 12 or mode == "max_size_cycle"
        assert steps[-1][1] == steps[-1][2] - 1


@pytest.mark.parametrize(("sizes", "settings", "left"), [
    ((4, 2), {}, 5),  # 20 of 29 samples, of which 9 are left
    ((4, 2), {"limit_train_batches": 12}, 2),  # of 24
    ((4, 2), {"limit_train_batches": 6}, 0),  # of 12
    ((4, 10), {"drop_last": True}, 0),  # 9 make no batch
])  # fmt: skip
def test_an_epoch_has_the_batches_that_are_left_of_it(sizes, settings, left, tmp_path):
    drop_last = settings.pop("drop_last", False)
    seen, trainer = lives(lambda size: loader(29, size, drop_last), sizes, (5,), tmp_path, **settings)
    length = trainer.num_training_batches
    rest = [(epoch, number) for epoch, number, *_ in seen[5:]]
    assert rest == [(0, number) for number in range(length - left, length)] + [(1, number) for number in range(length)]
    assert trainer.global_step == trainer.fit_loop.epoch_loop._batches_that_stepped == 5 + left + length
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_accumulation_and_validation_follow_the_batches(tmp_path):
    settings = {"validation": DataLoader(Rows(2)), "val_check_interval": 0.25}
    fit(loader(64, 8), Prefetch(), Stop(tmp_path / "c", 3), **settings)
    checks = Validations()
    seen, trainer = fit(
        loader(64, 4), Prefetch(), checks, ckpt=tmp_path / "c", accumulate_grad_batches=2, **settings
    )  # fmt: skip
    assert [number for epoch, number, *_ in seen if epoch == 0] == list(range(6, 16))
    assert checks.after == [(0, 7), (0, 11), (0, 15), (1, 3), (1, 7), (1, 11), (1, 15)]
    assert trainer.global_step == 3 + 5 + 8
    assert trainer.estimated_stepping_batches == 16


def test_a_loader_of_no_known_order_tells_in_numbers_what_other_ranks_do(tmp_path):
    def stateful():
        return StatefulDataLoader(Rows(24), 2, sampler=DistributedSampler(range(24), 2, 0))

    fit(stateful(), ExactResume(), Stop(tmp_path / "c", 3), use_distributed_sampler=False)
    saved = torch.load(tmp_path / "c", weights_only=True)
    torch.save({**saved, KEY: [{**each, "ranks": 2} for each in saved[KEY] * 2]}, tmp_path / "c")
    said = "goes on with 1 ranks x 2 samples in place of 2 x 2.*12 were used, and 6 count.*about 6 are seen twice"
    with pytest.warns(TurboWarning, match=said):
        fit(stateful(), ExactResume(), ckpt=tmp_path / "c")


def test_torchdatas_loader_tells_in_numbers_what_another_batch_size_does(tmp_path):
    fit(StatefulDataLoader(Rows(24), 2), ExactResume(), Stop(tmp_path / "c", 3))
    said = "goes on with 1 ranks x 4 samples in place of 1 x 2.*6 were used, and 12 .*about 6 are seen never"
    with pytest.warns(TurboWarning, match=said):
        seen, _ = fit(StatefulDataLoader(Rows(24), 4), ExactResume(), ckpt=tmp_path / "c")
    assert len([index for epoch, *_, parts in seen if epoch == 0 for index in parts["a"]]) == 24 - 6 - 6


class Sized(Stream):
    def __len__(self):
        return self.length


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(("stream", "sizes", "limit", "left"), [
    (Stream, (4, 2, 3), 1.0, 6), (Stream, (3, 8, 4), 1.0, 2), (Sized, (4, 2, 3), 1.0, 6), (Sized, (3, 5, 4), 1.0, 4),
    (Stream, (4, 2, 3), 8, 4), (Sized, (4, 2, 1), 9, 0),
])  # fmt: skip
def test_a_stream_goes_on_at_its_sample(stream, sizes, limit, left, tmp_path):
    """Twenty-nine samples of a stream in three lives, with two steps in each of the first two."""
    seen, trainer = lives(lambda size: DataLoader(stream(29), size), sizes, (2, 2), tmp_path, limit_train_batches=limit)
    first = [index for epoch, *_, parts in seen if epoch == 0 for index in parts["a"]]
    assert first == list(range(len(first)))
    assert len(first) == 29 or limit != 1.0
    second = [index for epoch, *_, parts in seen if epoch == 1 for index in parts["a"]]
    assert second == list(range(29 if limit == 1.0 else limit * sizes[2]))
    assert [number for epoch, number, *_ in seen if epoch == 1] == list(range(len(seen) - len(first_steps(seen))))
    assert len(first_steps(seen)) == 4 + left
    assert trainer.global_step == len(seen)


def first_steps(seen):
    return [step for step in seen if step[0] == 0]
