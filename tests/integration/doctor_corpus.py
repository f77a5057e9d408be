"""Small programs with one bad habit each, marked on its line, and programs without any.

The lines of a step go between ``loss = self.loss(batch)`` and ``return loss``; the other programs are complete.
"""

HEADER = """
import os, random, sys, time
import pytest
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from lightning_turbo import ApexAMP, ExactAccumulation
from tests.integration.doctor_runs import Base, ManualBase, images
FOLDER = os.path.dirname(__file__)
"""
STEP = """
class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        {}
        return loss
"""
SCHEDULE = """
class Model(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        {}
"""

# The finding is about the last line of each.
SICK_STEPS = [
    ("housekeeping", ["torch.cuda.empty_cache()"]),
    ("host-sync", ["self.kept = batch[0][batch[0] > 0].sum()"]),
    ("made-on-host", ["loss = loss + torch.tensor([0.5, 0.5], device=self.device).sum()"]),
    ("made-on-host", ["loss = loss + torch.as_tensor(np.ones(2), device=loss.device).sum()"]),
    ("made-on-host", ["loss = loss + batch[0].new_tensor([0.5, 0.5]).sum()"]),
    ("made-on-host", ["loss = loss + batch[0][:, [0, 2]].mean()"]),
    ("copied-array", ["loss = loss + torch.tensor(np.ones(3)).sum() * 0"]),
    ("progress-bar-sync", ["self.log('loss', loss, prog_bar=True)"]),
    ("progress-bar-sync", ["self.log_dict({'loss': loss, 'half': loss / 2}, prog_bar=True)"]),
    ("retained-graph", ["self.last_loss = loss"]),
    ("retained-graph", ["self.total = getattr(self, 'total', 0.0) + loss"]),
    ("retained-graph", ["self.seen = {**getattr(self, 'seen', {}), batch_idx: {'loss': loss}}"]),
    ("retained-graph", ["self.ring = [loss]; self.ring.append(self.ring)"]),
    ("waits-without-computing", ["time.sleep(0.02)"]),
    ("waits-without-computing", ["import subprocess; subprocess.run(['sleep', '0.02'])"]),
    ("waits-without-computing", ["import threading; threading.Event().wait(0.02)"]),
    ("prints", ["print('step', batch_idx)"]),
    ("anomaly-mode", ["with torch.autograd.detect_anomaly(): self.loss(batch)"]),
]
SICK_SCHEDULES = [
    ("stepped-per-epoch", "return [optimizer], [CyclicLR(optimizer, 0.01, 0.1, 2)]"),
    ("stepped-per-epoch", "return [optimizer], [OneCycleLR(optimizer, 0.1, 12)]"),
    ("loop-optimizer", "return torch.optim.Adam(self.parameters(), foreach=False)"),
]
SICK = """
class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3),  # in one line with others
            nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 4),
        )
        self.head = nn.Linear(4, 4)  # <- bias-before-norm
        self.norm = nn.BatchNorm1d(4)
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.norm(self.head(self.net(batch[0]))), batch[1])
    def train_dataloader(self):
        return DataLoader(images(40), batch_size=4)
---
class Model(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.net(x), batch[1])
    def configure_optimizers(self):
        groups = [{"params": [each], "weight_decay": 0.01 * (each.ndim > 1)} for each in self.parameters()]
        return torch.optim.AdamW(groups)  # <- small-groups
---
class Many(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return {str(n): torch.ones(1) for n in range(40)}

class Model(Base):
    def training_step(self, batch, batch_idx):
        return self.net(batch["0"].expand(-1, 8)).mean()
    def train_dataloader(self):
        return DataLoader(Many(), batch_size=4, num_workers=1)  # <- many-objects
---
class Slow(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        time.sleep(0.1)  # <- slow-hook
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        time.sleep(0.03)  # <- slow-hook

Model = Base
TRAINER = {"callbacks": [Slow()]}
---
class Model(Base):
    def validation_step(self, batch, batch_idx):
        time.sleep(0.4)  # <- long-validation, slow-line
    def val_dataloader(self):
        return DataLoader(images(12, 8), batch_size=4)
---
class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > -1e9 else -x  # <- host-sync

class Scores(nn.Module):
    def __init__(scores):
        super().__init__()
        scores.all = []
        scores.register_buffer("mean", torch.zeros(()))
    @staticmethod
    def reset(other):
        other.all = []
    def update(scores, logits):
        scores.all.append(logits)  # <- retained-graph
        scores.mean = 0.9 * scores.mean + logits.mean()  # <- retained-graph

class Keep(Callback):
    def __init__(self):
        self.kept = []
    def on_before_backward(self, trainer, pl_module, loss):
        self.kept.append(loss)  # <- retained-graph
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.last = outputs["loss"].item()  # <- host-sync

class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Gate(), nn.Flatten(), nn.Linear(36, 4))
        self.scores = Scores()
    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.scores.update(logits)
        return F.cross_entropy(logits, batch[1])
    def train_dataloader(self):
        return DataLoader(images(40), batch_size=4)

TRAINER = {"callbacks": [Keep()]}
---
class Model(ManualBase):
    def on_fit_start(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(self.loss(batch)))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # <- clip-before-unscale
        self.scaler.step(optimizer)
        self.scaler.update()
---
class Slow(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.ones(8, dtype=torch.float64), i % 4

class Model(Base):
    def training_step(self, batch, batch_idx):
        return self.loss((batch[0].float(), batch[1]))
    def train_dataloader(self):
        return DataLoader(Slow(), batch_size=4)  # <- waits-for-data, wide-batch, workers
---
class Model(Base):
    def train_dataloader(self):
        return DataLoader(images(40, 8), batch_size=4, num_workers=1)  # <- persistent-workers

TRAINER = {"max_epochs": 2}
---
np.save(FOLDER + "/scan.npy", np.ones((256, 128, 128), dtype=np.float32))

class Patches(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        scan = torch.from_numpy(np.load(FOLDER + "/scan.npy"))  # <- slow-line
        return scan[i, i, :8], i % 4

class Model(Base):
    def train_dataloader(self):
        return DataLoader(torch.utils.data.Subset(Patches(), range(40)), batch_size=4)
---
class Words(Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, i):
        total = 0
        for k in range(60000):
            total += k * i  # <- slow-line
        return torch.ones(8), total % 4

class Model(Base):
    def train_dataloader(self):
        return DataLoader(Words(), batch_size=4, num_workers=1, persistent_workers=True)

TRAINER = {"max_epochs": 2}
---
class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for _ in range(40):
            loss = loss + 0 * torch.ones(300, 300).matmul(torch.ones(300, 300)).sum()  # <- torch-outside
        return loss
---
class Model(Base):
    def training_step(self, batch, batch_idx):
        self.words = [str(k) for k in range(20000)]  # <- slow-line
        return self.loss(batch)
---
class Model(Base):
    pass

TRAINER = {
    "accumulate_grad_batches": 4,  # without a line: short-window
    "detect_anomaly": True,  # <- anomaly-mode
}
"""

CLEAN_STEPS = [
    ["if random.random() < 0.5: loss = loss * 1.0", "if torch.rand(1) < 0.5: loss = loss + 0.0",
     "self.last = torch.randint(0, 4, (1,)).item()"],
    ["if batch_idx % 50 == 0: self.last = loss.item()"],
    ["self.losses = [*getattr(self, 'losses', []), loss.detach()]"],
    ["self.log('loss', loss)", "self.log_dict({'twice': 2 * loss}, on_epoch=True)"],
    ["x = batch[0]", "if x.shape[0] > 2 and len(x) and x.numel() and not x.requires_grad: loss = loss / x.size(0)",
     "for row in x.split(2): loss = loss + row.mean() * 0"],
    ["loss = loss + torch.randn(4, device=self.device).mean() + torch.arange(4, device=batch[0].device).sum()"],
    ["x = torch.where(batch[0] > 0, batch[0], torch.zeros_like(batch[0]))", "x[x > 1] = 1.0",
     "loss = loss + x.mean() + F.one_hot(batch[1], 4).sum() * 0"],
    ["loss = loss + torch.as_tensor(np.ones(3), dtype=torch.float32).sum() * 0"],
]  # fmt: skip
CLEAN_SCHEDULES = [
    "return [optimizer], [{'scheduler': CyclicLR(optimizer, 0.01, 0.1, 2), 'interval': 'step'}]",
    "return [optimizer], [{'scheduler': OneCycleLR(optimizer, 0.1, 12), 'interval': 'step'}]",
    "return [optimizer], [StepLR(optimizer, 5)]",
]
CLEAN = """
class Maps(Dataset):
    def __init__(self):
        np.save(FOLDER + "/scan.npy", np.ones((64, 64, 64), dtype=np.float32))
        self.scan = np.load(FOLDER + "/scan.npy", mmap_mode="r")  # once: Python 3.14 reads 256 KiB to open one
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return torch.from_numpy(self.scan[i, i, :8].copy()), i % 4

class Model(Base):
    def train_dataloader(self):
        return DataLoader(Maps(), batch_size=4)
---
Model = Base
TRAINER = {
    "accumulate_grad_batches": 4, "callbacks": [ExactAccumulation()],
    "plugins": [ApexAMP("O2", dtype=torch.bfloat16)],
}
---
class Model(Base):
    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 1)
        last = torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 4))
        self.net = nn.Sequential(first, nn.BatchNorm2d(4), second, nn.GroupNorm(2, 4), nn.Flatten(), last)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            x = self.frozen(batch[0])
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False), batch[1])
    def train_dataloader(self):
        return DataLoader(images(40), batch_size=4)
---
class Model(ManualBase):
    def __init__(self):
        super().__init__()
        self.critic = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + self.critic(self.net(batch[0])).mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(2 * loss)
        for stepped in (*self.optimizers(), *self.lr_schedulers()):
            stepped.step()
    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters())
        second = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        return [first, second], [StepLR(each, 5) for each in (first, second)]
---
class Model(Base):
    def loss(self, batch):
        positions = batch[0].requires_grad_()
        (forces,) = torch.autograd.grad(self.net(positions).square().sum(), positions, create_graph=True)
        return forces.square().mean()
    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.log("val_loss", self.loss(batch), prog_bar=True)
    def val_dataloader(self):
        return self.train_dataloader()

TRAINER = {"val_check_interval": 2, "limit_val_batches": 2, "inference_mode": False}
"""


def marked(lines, rule):
    return "\n        ".join([*lines[:-1], f"{lines[-1]}  # <- {rule}"])


SICK_PROGRAMS = [
    *(STEP.format(marked(lines, rule)) for rule, lines in SICK_STEPS),
    *(SCHEDULE.format(marked([line], rule)) for rule, line in SICK_SCHEDULES),
    *SICK.split("---"),
]
CLEAN_PROGRAMS = [
    *(STEP.format("\n        ".join(lines)) for lines in CLEAN_STEPS),
    *(SCHEDULE.format(line) for line in CLEAN_SCHEDULES),
    *CLEAN.split("---"),
]
