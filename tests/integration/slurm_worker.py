"""A rank of a Slurm job that is told in the middle of a step that its time is up; run by test_slurm.py."""

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, PrefetchLoader

RANK = int(os.environ["SLURM_PROCID"])


class Net(pl.LightningModule):
    def __init__(self, told):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.told, self.seen = told, []

    def training_step(self, batch, index):
        if self.told and (self.current_epoch, index) == (1, 5):
            os.kill(os.getpid(), signal.SIGUSR1)
        self.seen.append(batch[1].tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1] % 3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(folder, told):
    """Train three epochs of ten batches in windows of four; every rank has its own order."""
    model = Net(told)
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40))
    generator = torch.Generator().manual_seed(RANK + 10 * told)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="turbo_ddp", max_epochs=3, default_root_dir=folder, logger=False,
        accumulate_grad_batches=4, use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, plugins=[ApexAMP("O2", dtype=torch.bfloat16)], callbacks=[ExactAccumulation()],
    )  # fmt: skip
    trainer.fit(model, PrefetchLoader(data, batch_size=4, shuffle=True, generator=generator))
    result = {"module": model.state_dict(), "seen": model.seen, "steps": trainer.global_step}
    torch.save(result, folder / f"{'told' if told else 'again'}.{RANK}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2] == "told")
    torch.distributed.destroy_process_group()
