"""Trains, resumes from two checkpoints, and compares the results, in one process or in each of two ranks."""

import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import ApexAMP
from tests.integration.recording import Save
from tests.trainers import quiet_trainer
from tests.versions import unpickling

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
}
LEVELS = ("O0", "O1", "O2", "O3")
ALL = [f"{level}-{optimizer}-bfloat16" for level in LEVELS for optimizer in OPTIMIZERS]
ALL += [f"{level}-{optimizer}-float16" for level in ("O1", "O2") for optimizer in OPTIMIZERS]
# After a step in the middle of an epoch, and at its end.
MOMENTS = {"mid_epoch": (4, "on_train_batch_end"), "epoch_end": (6, "on_train_epoch_end")}
BATCHES = 6
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Net(pl.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.kind = optimizer

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        # One overflow in the first epoch, so that the scaler's state matters.
        overflow = self.current_epoch == 0 and index == 1 and self.trainer.precision_plugin.half_dtype == torch.float16
        return loss * 1e30 if overflow else loss

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.kind](self.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Bits(pl.Callback):
    """Keeps everything that must be equal at the end of the run."""

    def on_train_end(self, trainer, module):
        self.state = {
            "module": {k: v.clone() for k, v in module.state_dict().items()},
            "updated": [p.detach().clone() for g in trainer.optimizers[0].param_groups for p in g["params"]],
            "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "scale": dict(trainer.precision_plugin.state_dict()),
            "step": trainer.global_step,
        }


def run(case, folder, moment=None):
    """Train from the beginning or from one of the checkpoints, and return the result."""
    level, optimizer, half = case.split("-")
    torch.manual_seed(1 if moment else 0)  # a resumed run must not depend on how it is initialized
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * BATCHES, 6, generator=generator)
    data = TensorDataset(x, torch.randint(0, 3, (len(x),), generator=generator))
    sampler = DistributedSampler(data, RANKS, RANK, shuffle=False) if RANKS > 1 else None
    bits = Bits()
    place = folder / case
    place.mkdir(parents=True, exist_ok=True)
    saves = [] if moment else [Save(place / f"{name}.ckpt", *when) for name, when in MOMENTS.items()]
    trainer = quiet_trainer(
        devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", max_epochs=2, accumulate_grad_batches=2,
        gradient_clip_val=1.0, callbacks=[bits, *saves], use_distributed_sampler=False,
        plugins=[ApexAMP(level, dtype=getattr(torch, half))],
    )  # fmt: skip
    ckpt = str(place / f"{moment}.ckpt") if moment else None
    loader = StatefulDataLoader(data, batch_size=8 // RANKS, sampler=sampler)
    trainer.fit(Net(optimizer), loader, ckpt_path=ckpt, **unpickling(True if moment else None))
    return bits.state


def run_all(case, folder):
    return {moment or "straight": run(case, folder, moment) for moment in (None, *MOMENTS)}


def assert_same(a, b, path=""):
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{index}")
    else:
        assert a == b, path


def check_resumed(case, ends):
    """Check that the run resumed from each checkpoint equals the uninterrupted one."""
    straight = ends["straight"]
    assert straight["step"] == 6
    if case.endswith("float16") and case[:2] in ("O1", "O2") and "bfloat16" not in case:
        assert straight["scale"]["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 5}
    for moment in MOMENTS:
        assert_same(straight, ends[moment], f"{case}/{moment}")
