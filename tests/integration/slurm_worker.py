"""A rank of a Slurm job that is told in the middle of a step that its time is up; run by test_slurm.py."""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from lightning_turbo import ApexAMP, ExactAccumulation, PrefetchLoader, TurboDDPStrategy
from tests.integration.ranks_worker import SAMPLES, Net
from tests.trainers import quiet_trainer

RANK = int(os.environ["SLURM_PROCID"])


class Told(Net):
    def __init__(self, told):
        super().__init__()
        self.told, self.tests = told, 0

    def training_step(self, batch, index):
        if (self.current_epoch, index) == self.told:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.tests += not self.trainer.sanity_checking


def main(folder, told):
    """Train three epochs of ten batches in windows of four; every rank has its own order."""
    model = Told(told)
    data = Subset(SAMPLES, range(40))
    generator = torch.Generator().manual_seed(RANK + (0 if told else 10))
    trainer = quiet_trainer(
        devices=2, strategy=TurboDDPStrategy(), max_epochs=3, default_root_dir=folder,
        accumulate_grad_batches=4, use_distributed_sampler=False, plugins=[ApexAMP("O2", dtype=torch.bfloat16)],
        callbacks=[ExactAccumulation()],
    )  # fmt: skip
    trainer.fit(model, PrefetchLoader(data, batch_size=4, shuffle=True, generator=generator), DataLoader(data, 40))
    result = {"module": model.state_dict(), "seen": model.seen, "steps": trainer.global_step, "tests": model.tests}
    torch.save(result, folder / f"{'told' if told else 'again'}.{RANK}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # At which batch of the second epoch which ranks are told.
    word, batch, ranks = sys.argv[2:]
    told = ((1, int(batch)) if str(RANK) in ranks else (-1, 0)) if word == "told" else None
    main(Path(sys.argv[1]), told)
    torch.distributed.destroy_process_group()
