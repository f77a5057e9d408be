"""Scripts that call fit: one part is slow in some of them, and none in the others."""

SCRIPT = """
import time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

{before}

def images(count):
    return TensorDataset(torch.randn(count, 64), torch.randint(0, 4, (count,)))

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
        {made}

    def loss(self, batch):
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        {step}
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        {validation}
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return {optimizer}

    def train_dataloader(self):
        return {loader}

    def val_dataloader(self):
        return {validation_loader}

    {hooks}

Trainer(
    accelerator="cpu", max_epochs={epochs}, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing={checkpoints}, callbacks={callbacks},
).fit(Net())
"""
PARTS = {
    "before": "", "made": "", "step": "", "validation": "", "hooks": "", "epochs": "3", "checkpoints": "False",
    "callbacks": "[]", "optimizer": "torch.optim.SGD(self.parameters(), lr=0.1)",
    "loader": "DataLoader(images(1280), batch_size=32, shuffle=True)",
    "validation_loader": "DataLoader(images(128), batch_size=32)",
}  # fmt: skip

STARTS = """
def start(worker):
    time.sleep(0.8)
"""
SAVES = """
class Slow(ModelCheckpoint):
    pass

class State(Callback):
    def state_dict(self):
        time.sleep(1.5)
        return {"mean": 0.0}
"""
HOOK = """
class Averages(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        time.sleep(1.5)
"""
STEP_HOOK = """
class Looks(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.linalg.svd(torch.ones(300, 300))
"""
MANY = """
class Many(Dataset):
    def __len__(self):
        return 1280
    def __getitem__(self, i):
        return {str(n): torch.ones(1) for n in range(112)}
"""
HEAVY_METRIC = """
from torchmetrics import Metric

class Slow(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()))
    def update(self, value):
        self.total += value.detach()
    def compute(self):
        torch.linalg.svd(torch.ones(300, 300))
        return self.total
"""

# Name -> the parts of the script that differ, the rule that reports the cause, and a word of the report.
PLANTED = {
    "slow worker start": (
        {"before": STARTS, "loader": "DataLoader(images(1280), 32, num_workers=1, worker_init_fn=start)"},
        {"persistent-workers"}, "new workers",
    ),
    "slow start of validation": (
        {"before": STARTS, "validation_loader": "DataLoader(images(128), 32, num_workers=1, worker_init_fn=start)"},
        {"persistent-workers", "long-validation"}, "validation",
    ),
    "slow validation": ({"validation": "time.sleep(0.5)"}, {"long-validation"}, "longer than its training"),
    "slow save": (
        {"before": SAVES, "checkpoints": "True", "callbacks": "[State(), Slow('saved')]"}, {"slow-checkpoint"}, "take",
    ),
    "slow hook": ({"before": HOOK, "callbacks": "[Averages()]"}, {"slow-hook"}, "Averages.on_train_epoch_end"),
    "slow hook in steps": (
        {"before": STEP_HOOK, "callbacks": "[Looks()]"}, {"slow-hook", "loop-overhead"}, "Looks.on_train_batch_end",
    ),
    "400 groups": (
        {
            "made": "self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(400))",
            "step": "batch[0] = batch[0] + 0 * torch.cat(list(self.scales)).sum()",
            "optimizer": "torch.optim.AdamW([{'params': [each]} for each in self.parameters()], lr=0.1)",
        },
        {"small-groups"}, "404 groups",
    ),
    "sleeping step": ({"step": "time.sleep(0.03)"}, {"waits-without-computing"}, "time.sleep"),
    "many objects": (
        {
            "before": MANY, "loader": "DataLoader(Many(), batch_size=32, num_workers=1, persistent_workers=True)",
            "step": "batch = [batch['0'].expand(-1, 64), torch.zeros(32, dtype=torch.long)]",
        },
        {"many-objects"}, "112 tensors",
    ),
    "metric in each step": (
        {"before": HEAVY_METRIC, "made": "self.metric = Slow()", "step": "self.metric(self.loss(batch))"},
        {"slow-line"}, "torch.linalg.svd",
    ),
}  # fmt: skip
CLEAN = {
    "plain": {},
    "workers that stay": {
        "step": "(torch.ones(900, 900) @ torch.ones(900, 900)).sum()",
        "loader": "DataLoader(images(320), 8, num_workers=1, persistent_workers=True)",
        "validation_loader": "DataLoader(images(32), 8, num_workers=1, persistent_workers=True)",
    },
    "checkpoints": {"checkpoints": "True", "callbacks": "[ModelCheckpoint('saved', monitor='val_loss')]"},
    "two groups": {
        "optimizer": "torch.optim.AdamW([{'params': list(self.parameters())[:2]},"
        " {'params': list(self.parameters())[2:], 'weight_decay': 0.0}], lr=0.1)",
    },
    "schedule and hooks": {
        "before": "def scheduled(it):\n    return [it], [torch.optim.lr_scheduler.StepLR(it, 1)]",
        "optimizer": "scheduled(torch.optim.SGD(self.parameters(), 0.1))",
        "hooks": "def on_train_epoch_end(self):\n        self.log('epoch', float(self.current_epoch))",
    },
}  # fmt: skip


def script(parts):
    """Return the text of a script that calls fit."""
    return SCRIPT.format(**{**PARTS, **parts})
