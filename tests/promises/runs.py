"""Datasets that a thread gains from, loaders that go on from a state, and runs of a Trainer with their checkpoints."""

import random
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch.utils.data import Dataset

from lightning_turbo import ExactResume, Prefetch
from lightning_turbo.errors import TurboWarning
from tests.data.samples import saved
from tests.trainers import quiet_trainer
from tests.versions import unpickling

LENGTH = 32  # samples, eight batches of four


class Slow(Dataset):
    """Its samples are their indices, and another thread gets its turn while one is loaded.

    Args:
        change: Makes a sample of an index.
        seconds: How long a sample takes.
    """

    def __init__(self, change=int, length=LENGTH, seconds=1e-4):
        self.change, self.length, self.seconds = change, length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.change(index)


def listed(batch):
    """Return a batch as lists, which compare by ``==``."""
    if isinstance(batch, dict):
        return {name: listed(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [listed(part) for part in batch]
    return batch.tolist() if isinstance(batch, (torch.Tensor, np.ndarray)) else batch


def flat(batches):
    """Return the samples of batches that are lists."""
    return [sample for batch in batches for sample in batch]


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def draws():
    """Return one number of each global generator."""
    return torch.rand(()).item(), random.random(), np.random.rand()


def generators():
    """Return the states of the global generators."""
    kind, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, words.tolist(), *rest)


def put_back(states):
    numbers, python, (kind, words, *rest) = states
    torch.set_rng_state(torch.tensor(numbers, dtype=torch.uint8))
    random.setstate(python)
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))


def another_process(make, loader):
    """Return a new loader with the state of another one, which is closed, and the same states of the generators."""
    state, states = saved(loader.state_dict()), generators()
    if hasattr(loader, "close"):
        loader.close()
    seed(99)
    again = make()
    again.load_state_dict(state)
    put_back(states)
    return again


def is_told(call):
    """Return what a call returns, and the texts of the TurboWarnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(each.message) for each in caught if issubclass(each.category, TurboWarning)]


def end_of(trainer, files):
    """Return what a run has come to: weights, optimizer, steps, and the checkpoints of a pattern in its folder."""
    folder = Path(trainer.default_root_dir)
    return {
        "weights": trainer.lightning_module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "steps": trainer.global_step,
        "files": sorted(str(file.relative_to(folder)) for file in folder.rglob(files)),
    }


class Net(LightningModule):
    """Records each batch with random numbers that its step draws, and at the end its weight, which depends on all."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        drawn = draws()
        self.seen.append((listed(batch), drawn))
        return (self.weight - sum(drawn)).square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        self.seen.append(self.weight.item())


class Save(Callback):
    """Saves a checkpoint after so many steps and ends the run."""

    def __init__(self, path, steps):
        self.path, self.steps = path, steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def stock(loaders, *callbacks, **settings):
    """Return what a run without this package sees."""
    return _fit(loaders, callbacks, None, **settings)


def turbo(loaders, *callbacks, path=None, **settings):
    """Return what a run sees whose plain loaders prefetch, and which may be resumed from a checkpoint."""
    return _fit(loaders, [Prefetch(), *callbacks], path, **settings)


def resuming(loaders, *callbacks, path=None, **settings):
    """Return what a run with loaders of this package sees, which may be resumed from a checkpoint."""
    return _fit(loaders, [ExactResume(), *callbacks], path, **settings)


def _fit(loaders, callbacks, path, validation=None, model=Net, max_epochs=2, **settings):
    seed_everything(99 if path else 0, verbose=False)
    net = model()
    trainer = quiet_trainer(callbacks=list(callbacks), max_epochs=max_epochs, num_sanity_val_steps=0, **settings)
    trainer.fit(net, loaders, validation, ckpt_path=path, **unpickling(True if path else None))
    return net.seen


def stopped(run, make, stops, folder, *callbacks, **settings):
    """Return what a run sees that is stopped after each number of steps, and resumed with new loaders each time."""
    seen, path = [], None
    for steps in stops:
        here = folder / f"{steps}.ckpt"
        *steps_seen, _weight = run(make(), *callbacks, Save(here, steps), path=path, **settings)
        seen += steps_seen
        path = here
    return seen + run(make(), *callbacks, path=path, **settings)
