"""Two ranks that stop in the middle of an accumulation window, together or one alone; run by test_alone.py."""

import os
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, PrefetchLoader, _distributed
from tests.versions import unpickling

RANK = int(os.environ["RANK"])


class Net(pl.LightningModule):
    def __init__(self, stop=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.stop, self.seen = stop, []

    def training_step(self, batch, index):
        if self.stop == "alone" and index == 5:
            if RANK == 0:
                raise KeyError("the error of rank 0")
            self.wait_in_the_step()
        self.seen.append(batch[1].tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1] % 3)

    def wait_in_the_step(self):
        folder = Path(self.trainer.default_root_dir)
        while not (folder / "alone.ckpt").exists():
            time.sleep(0.05)
        os._exit(0)

    def on_train_batch_end(self, outputs, batch, index):
        if self.stop == "together" and index == 5:
            self.trainer._signal_connector.received_sigterm = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(folder, stop=None, ckpt=None):
    """Train two epochs of ten batches in windows of four; every rank has its own order."""
    model = Net(stop)
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40))
    generator = torch.Generator().manual_seed(RANK + 10 * (ckpt is not None))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="turbo_ddp", max_epochs=2, default_root_dir=folder,
        accumulate_grad_batches=4, use_distributed_sampler=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[ApexAMP("O2", dtype=torch.bfloat16, loss_scale=8.0)],
        callbacks=[ExactAccumulation(), OnExceptionCheckpoint(folder, filename=str(stop))],
    )  # fmt: skip
    trainer.fit(
        model,
        PrefetchLoader(data, batch_size=4, shuffle=True, generator=generator),
        ckpt_path=ckpt,
        **unpickling(False),
    )
    return {"module": model.state_dict(), "seen": model.seen, "steps": trainer.global_step}


def alone(folder):
    _distributed.PATIENCE = 2.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(folder, "alone")
        except Exception as error:
            chain = [error]
            while chain[-1].__context__ is not None:
                chain.append(chain[-1].__context__)
            said = [str(warning.message) for warning in caught if "alone" in str(warning.message)]
            torch.save({"errors": [repr(each) for each in chain], "warnings": said}, folder / "alone")
    os._exit(0)  # the group is broken


def together(folder):
    warnings.simplefilter("ignore")
    straight = fit(folder)
    try:
        fit(folder, "together")
    except SIGTERMException:
        torch.save(straight, folder / f"straight.{RANK}")
    torch.save(fit(folder, ckpt=folder / "together.ckpt"), folder / f"again.{RANK}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(folder, ckpt=folder / "alone.ckpt")
    said = [str(warning.message) for warning in caught if "window" in str(warning.message)]
    torch.save({**result, "warnings": said}, folder / f"from_alone.{RANK}")


def places(folder):
    """At different batches, as ranks with loaders of different lengths are when an epoch of one has ended."""
    torch.distributed.init_process_group("gloo")
    ordinary = _distributed.gather_for_checkpoint(RANK, "number", place=RANK)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            raise RuntimeError("an error on both ranks")
        except RuntimeError:
            stopped = _distributed.gather_for_checkpoint(RANK, "number", place=RANK)
            same = _distributed.gather_for_checkpoint(RANK, "number", place=3, to_all=True)
    said = [str(warning.message) for warning in caught]
    torch.save({"ordinary": ordinary, "stopped": stopped, "same": same, "said": said}, folder / f"places.{RANK}")
    torch.distributed.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"alone": alone, "together": together, "places": places}[sys.argv[1]](Path(sys.argv[2]))
