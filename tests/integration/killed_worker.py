"""Two ranks that kill themselves at chosen moments, each moment once; run by test_killed.py.

``python killed_worker.py LEVEL FOLDER KILLS EPOCHS`` under torchrun is one rank. With ``fork`` before these words it
starts both ranks itself, on torchrun's own agent, from a process that has imported everything. KILLS is a
comma-separated list of ``where:rank:step:seed``; they happen in turn, one in each life of the job.
"""

import json
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader

from lightning_turbo import ApexAMP, AtomicCheckpointIO, TurboDDPStrategy
from lightning_turbo.data.loading import thread_policy
from tests.data.samples import Rows, seeded
from tests.integration.noting import gives
from tests.trainers import quiet_trainer
from tests.versions import unpickling

SAMPLES, BATCH, WINDOW = 96, 4, 2
STEPS_OF_AN_EPOCH = SAMPLES // (2 * BATCH * WINDOW)


class Kill:
    """The first of the planned kills that has not happened yet; without any, ``at`` does nothing.

    Args:
        folder: Where the kills that happened are marked.
        plan: All kills, in their order.
    """

    def __init__(self, folder, plan):
        left = [(folder / f"kill.{n}", kill) for n, kill in enumerate(plan) if not (folder / f"kill.{n}").exists()]
        self.mark, (self.where, rank, step, seed) = left[0] if left else (None, (None, -1, 0, 0))
        self.mine = int(rank) == int(os.environ["RANK"])
        self.step, self.random = int(step), random.Random(seed)
        self.reached = threading.Event()
        self.thread = None

    def at(self, where):
        """Die here, if this is the place, this the rank, and the step has come."""
        if self.mine and self.where == where and self.reached.is_set():
            self.now()

    def now(self):
        os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)

    def arm(self):
        """Watch files being written, or wait for a moment of chance in a thread."""
        if not self.mine:
            return
        if self.where == "write":
            save = torch.save
            torch.save = lambda content, file, **kwargs: save(content, Dying(file, self), **kwargs)
        elif self.where == "place":
            replace = os.replace
            os.replace = lambda *paths: (self.at("place"), replace(*paths))
        elif self.where == "random":
            self.thread = threading.Thread(target=self.any_moment, daemon=True)
            self.thread.start()

    def any_moment(self):
        self.reached.wait()
        threading.Event().wait(self.random.uniform(0, 0.1))
        self.now()


class Dying:
    """A file whose process dies when half a MiB of a checkpoint is written to it."""

    def __init__(self, file, kill):
        self.file, self.kill, self.count = file, kill, 0

    def write(self, data):
        self.count += memoryview(data).nbytes
        written = self.file.write(data)
        self.file.flush()
        if self.count > 2**19:
            self.kill.at("write")
        return written

    def flush(self):
        self.file.flush()


def samples(kill):
    generator = seeded()
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)

    def load(index):
        kill.at("prefetch")
        return x[index], y[index]

    return Rows(SAMPLES, load)


class Net(pl.LightningModule):
    def __init__(self, kill):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Linear(16, 3)
        self.kill = kill

    def training_step(self, batch, index):
        hidden = self.first(batch[0])
        self.kill.at("forward")
        hidden.register_hook(lambda gradient: self.kill.at("backward"))
        loss = nn.functional.cross_entropy(self.second(hidden).float(), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=7, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["ballast"] = torch.zeros(2**18)  # 1 MiB, so that writing takes a while


class Story(pl.Callback):
    """Tells the kill how far the run is, and writes where each life began and how the last one ended."""

    def __init__(self, kill, folder):
        self.kill, self.folder = kill, folder

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            life = {"life": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "step": trainer.global_step}
            with open(self.folder / "lives", "a") as file:
                file.write(json.dumps(life) + "\n")
        self.kill.arm()

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step >= self.kill.step:
            self.kill.reached.set()

    def on_train_end(self, trainer, module):
        if self.kill.thread is not None:
            self.kill.thread.join()  # it ends this process
        final = {
            "module": {name: value.clone() for name, value in module.state_dict().items()},
            "masters": [p.detach().clone() for g in trainer.optimizers[0].param_groups for p in g["params"]],
            "optimizer": trainer.optimizers[0].state_dict(),
            "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "step": trainer.global_step,
            "loss": trainer.callback_metrics["loss"],
        }
        torch.save(final, self.folder / f"final.{trainer.global_rank}")


def run(level, folder, kills, epochs):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(folder)
    for path in folder.rglob("*.ckpt"):  # what the life before left
        torch.load(path, weights_only=True)
    kill = Kill(folder, [kill.split(":") for kill in kills.split(",") if kill])
    saves = ModelCheckpoint(
        folder / "checkpoints", filename="{step}", every_n_train_steps=2, save_last=True, enable_version_counter=False
    )
    # One level writes in the background: no rank's state is lost there either.
    strategy = TurboDDPStrategy(checkpoint_io=AtomicCheckpointIO(background=level == "O2"))
    trainer = quiet_trainer(
        devices=2, strategy=strategy, max_epochs=int(epochs), accumulate_grad_batches=WINDOW,
        callbacks=[saves, Story(kill, folder)], plugins=[ApexAMP(level, dtype=torch.bfloat16)], gradient_clip_val=1.0,
        enable_checkpointing=True,
    )  # fmt: skip
    data = gives(DataLoader(samples(kill), batch_size=BATCH, shuffle=True), prefetch_batches=2)
    trainer.fit(Net(kill), data, ckpt_path="last", **unpickling(True))


def main():
    if sys.argv[1] != "fork":
        run(*sys.argv[1:])
        return
    kills = sys.argv[4]
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="killed", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=len(kills.split(",")), monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, run)(*sys.argv[2:])


if __name__ == "__main__":
    # These samples load fast, and are to be loaded in the background all the same.
    thread_policy.MIN_BATCH_SECONDS = 0.0
    main()
