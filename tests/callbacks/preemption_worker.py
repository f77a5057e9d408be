"""A rank that trains until it is told to end, and goes on from where it ended; run by test_preemption.py.

``python preemption_worker.py FOLDER [kill]``: with ``kill``, rank 0 kills itself while it writes ``preempted.ckpt``.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import AtomicCheckpointIO, Preemption, PrefetchLoader, TurboDDPStrategy
from tests.trainers import quiet_trainer

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SAMPLES = TensorDataset(torch.randn(240, 4, generator=torch.Generator().manual_seed(0)), torch.arange(240))
STEPS = 2 * 240 // 2 // 4 // 2  # epochs, ranks, batch size, window


class Net(LightningModule):
    """Draws random numbers, and writes down which samples it saw."""

    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.folder = folder

    def training_step(self, batch, index):
        time.sleep(0.005)
        with open(self.folder / f"seen.{RANK}", "a") as file:
            print(self.trainer.global_step, *batch[1].tolist(), file=file)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, index):
        time.sleep(0.01)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class KilledInTheWrite(AtomicCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if Path(path).name == "preempted.ckpt":
            sync = os.fsync
            os.fsync = lambda file: (sync(file), os.kill(os.getpid(), signal.SIGKILL))
        super().save_checkpoint(checkpoint, path, storage_options)


def main(folder, kill):
    save = ModelCheckpoint(folder / "saves", "{step}", every_n_train_steps=8, save_top_k=1, monitor="step", mode="max")
    io = KilledInTheWrite() if kill and RANK == 0 else AtomicCheckpointIO()
    trainer = quiet_trainer(
        devices=RANKS, strategy=TurboDDPStrategy(checkpoint_io=io), max_epochs=2, accumulate_grad_batches=2,
        enable_checkpointing=True, callbacks=[save, Preemption()], val_check_interval=12, num_sanity_val_steps=0,
        default_root_dir=folder,
    )  # fmt: skip
    path = Preemption.resume_path(folder)
    model = Net(folder)
    torch.manual_seed(RANK)
    data = PrefetchLoader(SAMPLES, batch_size=4, shuffle=True, num_workers=1)
    trainer.fit(model, data, DataLoader(SAMPLES, 120), ckpt_path=path, weights_only=False)
    torch.save(model.state_dict(), folder / f"end.{RANK}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2:] == ["kill"])
