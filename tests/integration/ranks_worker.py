"""Jobs of two ranks, one after the other in one process each, because starting one costs more; run by test_ranks.py.

``ranks_worker.py FOLDER JOB...``
"""

import contextlib
import itertools
import os
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_turbo import ApexAMP, ExactAccumulation, PrefetchLoader, TurboDDPStrategy, _distributed
from lightning_turbo.data import prefetcher
from tests import registry
from tests.integration import resume_worker
from tests.versions import unpickling

RANK = int(os.environ.get("RANK", 0))
LEVELS = ("O0", "O1", "O2", "O3")
FLAGS = {
    "accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def techniques(folder, groups=(tuple(registry.BY_NAME),)):
    """Trains with groups of techniques, of which all is one, at every level."""
    for names, level in itertools.product(groups, LEVELS):
        _, model = registry.run(pl, level, [registry.BY_NAME[name] for name in names], devices=2)
        yield f"{'+'.join(names)}.{level}", {"losses": model.losses, "module": model.state_dict()}


def pairs(folder):
    return techniques(folder, list(itertools.combinations(registry.BY_NAME, 2)))


class Linear(pl.LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.steps = 0

    def training_step(self, batch, index):
        self.steps += 1
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def agreement(folder):
    """Starts ranks with settings that differ."""
    cases = {
        "same": {},
        "level": {"level": ("O1", "O2")[RANK]},
        "scale": {"scale": (128.0, 256.0)[RANK]},
        "trainer": {"accumulate_grad_batches": 1 + RANK, "max_epochs": 1 + RANK},
        "strategy": {"strategy": ({}, {"grad_compression": "fp16", "bucket_cap_mb": 50})[RANK]},
        "network": {"width": 3 + RANK},
        "checkpoint": {"ckpt": (folder / "one.ckpt", None)[RANK]},
    }
    for case, settings in cases.items():
        yield f"agreement.{case}", start(folder, **settings)


def start(folder, level="O1", scale=None, width=3, ckpt=None, strategy=None, **settings):
    model = Linear(width)
    plugins = [ApexAMP(level, dtype=torch.bfloat16, loss_scale=scale)]
    flags = {**FLAGS, "max_epochs": 1, "plugins": plugins, "default_root_dir": folder, **settings}
    trainer = pl.Trainer(strategy=TurboDDPStrategy(**(strategy or {})), **flags)
    said = ""
    try:
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2), ckpt_path=ckpt)
        trainer.save_checkpoint(folder / "one.ckpt")
    except MisconfigurationException as error:
        said = str(error)
    return {"said": said, "steps": model.steps}


def resume(folder):
    """Trains, and goes on from three checkpoints."""
    for case in ("O1-adamw_fused-float16", "O2-sgd-float16"):
        yield f"resume.{case}", resume_worker.run_all(case, folder)


class Net(pl.LightningModule):
    """Is told to stop in the middle of an accumulation window, with the other rank or alone."""

    def __init__(self, stop=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.stop, self.seen = stop, []

    def training_step(self, batch, index):
        if self.stop == "alone" and index == 5:
            if RANK == 0:
                raise KeyError("the error of rank 0")
            while not (Path(self.trainer.default_root_dir) / "alone.ckpt").exists():
                time.sleep(0.05)
            os._exit(0)
        self.seen.append(batch[1].tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1] % 3)

    def on_train_batch_end(self, outputs, batch, index):
        if self.stop == "together" and index == 5:
            self.trainer._signal_connector.received_sigterm = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(folder, stop=None, ckpt=None):
    """Trains two epochs of ten batches in windows of four; every rank has its own order."""
    model = Net(stop)
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40))
    generator = torch.Generator().manual_seed(RANK + 10 * (ckpt is not None))
    trainer = pl.Trainer(
        **{**FLAGS, "enable_checkpointing": True}, strategy="turbo_ddp", max_epochs=2, default_root_dir=folder,
        accumulate_grad_batches=4, use_distributed_sampler=False,
        plugins=[ApexAMP("O2", dtype=torch.bfloat16, loss_scale=8.0)],
        callbacks=[ExactAccumulation(), OnExceptionCheckpoint(folder, filename=str(stop))],
    )  # fmt: skip
    loader = PrefetchLoader(data, batch_size=4, shuffle=True, generator=generator)
    trainer.fit(model, loader, ckpt_path=ckpt, **unpickling(False))
    return {"module": model.state_dict(), "seen": model.seen, "steps": trainer.global_step}


def stopped(folder):
    """Both ranks are told to stop, and go on."""
    yield "stopped.straight", fit(folder)
    with contextlib.suppress(SIGTERMException):
        fit(folder, "together")
        raise AssertionError("was not told to stop")
    yield "stopped.again", fit(folder, ckpt=folder / "together.ckpt")


def alone(folder):
    """One rank ends by an error while the other waits in its step."""
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
            torch.save({"errors": [repr(each) for each in chain], "said": said}, folder / "alone")
    os._exit(0)  # the group is broken


def after_alone(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(folder, ckpt=folder / "alone.ckpt")
    said = [str(warning.message) for warning in caught if "window" in str(warning.message)]
    yield "after_alone", {**result, "said": said}


def places(folder):
    """Gathers at different batches, as ranks are with loaders of different lengths when an epoch of one has ended."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    gather = _distributed.gather_for_checkpoint
    result = {"ordinary": gather(RANK, "number", place=RANK)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            raise RuntimeError("an error on both ranks")
        except RuntimeError:
            result["stopped"] = gather(RANK, "number", place=RANK)
            result["same"] = gather(RANK, "number", place=3, to_all=True)
    yield "places", {**result, "said": [str(warning.message) for warning in caught]}


class Mean(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


POINTS = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(7)), torch.arange(40))


def uneven(samples):
    """Keeps 3 samples of an even first index, 1 of an odd one: ranks get different weights."""
    return whole(samples[: 3 if samples[0][1] % 2 == 0 else 1])


def whole(samples):
    return [torch.stack([x for x, _ in samples])]


def accumulation(folder):
    """ExactAccumulation with and without weights: 5 batches a rank in windows of 3 and 2."""
    for weighted in (False, True):
        model = Mean()
        trainer = pl.Trainer(
            **FLAGS, strategy="ddp", use_distributed_sampler=False, max_epochs=2, accumulate_grad_batches=3,
            gradient_clip_val=0.5, callbacks=[ExactAccumulation((lambda batch: len(batch[0])) if weighted else None)],
            plugins=[ApexAMP("O0", loss_scale=256.0)] if weighted else None,
        )  # fmt: skip
        sampler = DistributedSampler(POINTS, 2, RANK, shuffle=False)
        trainer.fit(model, DataLoader(POINTS, 4, collate_fn=uneven if weighted else whole, sampler=sampler))
        yield f"accumulation.{weighted}", {"module": model.state_dict()}


def main():
    torch.set_num_threads(1)
    prefetcher.WORTH = 0.0  # every prefetching loader gets a thread, fast as it is
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    jobs = (techniques, pairs, agreement, resume, stopped, alone, after_alone, places, accumulation)
    for job in (job for word in sys.argv[2:] for job in jobs if job.__name__ == word):
        for name, result in job(folder):
            torch.save(result, folder / f"{name}.{RANK}")


if __name__ == "__main__":
    main()
