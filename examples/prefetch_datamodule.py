"""Prefetch real data on the CPU: scikit-learn's digits, stored as one file per image.

Run it with ``python examples/prefetch_datamodule.py``. It trains the same small network on the same files twice, with
``LightningDataModule`` and with ``PrefetchDataModule``, compares the losses, and prints the time per epoch of both.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import PrefetchDataModule


class Files(Dataset):
    """One file per image. Each read waits for ``latency`` seconds first, as on a network drive."""

    def __init__(self, folder: Path, latency: float):
        self.paths = sorted(folder.glob("*.npy"))
        self.labels = np.load(folder / "labels" / "all.npy")
        self.latency = latency

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        time.sleep(self.latency)
        return torch.from_numpy(np.load(self.paths[index])), int(self.labels[index])


class Digits(LightningDataModule):
    """An ordinary DataModule."""

    def __init__(self, folder: Path, latency: float):
        super().__init__()
        self.folder, self.latency = folder, latency

    def train_dataloader(self):
        return DataLoader(Files(self.folder, self.latency), batch_size=32, shuffle=True)


class FastDigits(PrefetchDataModule, Digits):
    """The same DataModule with prefetching."""


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 128, 3, padding=1), nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 64, 10),
        )  # fmt: skip
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class EpochTimer(Callback):
    """Measures the seconds of each training epoch."""

    def __init__(self):
        self.seconds = []

    def on_train_epoch_start(self, trainer, module):
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        self.seconds.append(time.perf_counter() - self.started)


def train(datamodule, epochs):
    torch.manual_seed(0)
    net, timer = Net(), EpochTimer()
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[timer], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, datamodule=datamodule)
    return torch.stack(net.losses), min(timer.seconds[1:] or timer.seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=1797)
    parser.add_argument("--latency", type=float, default=0.0002, help="seconds of waiting before each read")
    options = parser.parse_args()
    if options.epochs < 1 or not 1 <= options.images <= 1797 or options.latency < 0:
        given = ", ".join(f"--{name} {value}" for name, value in vars(options).items())
        parser.error(f"expected --epochs of 1 or more, --images from 1 to 1797 and --latency of 0 or more, got {given}")
    warnings.filterwarnings("ignore", ".*does not have many workers")
    digits = load_digits()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "labels").mkdir()
        np.save(folder / "labels" / "all.npy", digits.target[: options.images])
        for number, image in enumerate(digits.images[: options.images]):
            np.save(folder / f"{number:04d}.npy", (image / 16).astype(np.float32))
        plain_losses, plain = train(Digits(folder, options.latency), options.epochs)
        fast_losses, fast = train(FastDigits(folder, options.latency), options.epochs)
    print(f"LightningDataModule: {plain:.2f} s per epoch, last loss {plain_losses[-1]:.4f}")
    print(f"PrefetchDataModule:  {fast:.2f} s per epoch, last loss {fast_losses[-1]:.4f}")
    print(f"the losses are {'bitwise identical' if torch.equal(plain_losses, fast_losses) else 'NOT identical'}")
    print(f"prefetching made an epoch {plain / fast:.2f} times as fast")


if __name__ == "__main__":
    main()
