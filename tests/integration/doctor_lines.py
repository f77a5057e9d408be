"""Scripts with one slow line each, at steps of about 2 to 200 ms, and scripts without any.

``# slow`` marks the line, and the others of the same block.
"""

SCRIPT = """
import json, random, re, sys, time, zlib
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

N = {n}
WORKERS = {workers}

class Data(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        {sample}
        return x, i % 4

def collate(samples):
    {collate}
    return default_collate(samples)

class Order(BatchSampler):
    def __iter__(self):
        for batch in super().__iter__():
            {order}
            yield batch

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, WIDTH := 64 * min(N, 16))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x):
        {forward}
        return self.out(F.relu(self.linear(x)))

def helper(x):
    {helper}
    return x

class Watches(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        {callback}

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Block()

    def training_step(self, batch, batch_idx):
        x = helper(batch[0])
        loss = F.cross_entropy(self.net(x), batch[1])
        {step}
        return loss

    def on_before_optimizer_step(self, optimizer):
        {gradients}

    def validation_step(self, batch, batch_idx):
        {validation}
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_end(self):
        {epoch}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    data = Data({batches} * 8)
    loader = DataLoader(
        data, batch_sampler=Order(RandomSampler(data), 8, False), collate_fn=collate, num_workers=WORKERS,
        persistent_workers=WORKERS > 0,
    )
    Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[Watches()],
    ).fit(Net(), loader, DataLoader(Data(32), 8))
"""
NOTHING = dict.fromkeys(
    ("sample", "collate", "order", "forward", "helper", "callback", "step", "gradients", "validation", "epoch"), "pass"
)

# Name -> place, the slow lines, and whether worker processes may run them. N is about the milliseconds of a step.
SLOW = {
    "text in a helper": ("helper", ["words = re.findall('[a-z]+', 'some words of a text ' * 800 * N)  # slow"], False),
    "masks in forward": (
        "forward",
        [
            "mask = [  # slow", "    (i * j) % 7 < 3  # slow",
            "    for i in range(16 * N) for j in range(400)  # slow", "]  # slow",
        ],
        False,
    ),
    "sorted samples": ("sample", ["np.sort(np.random.rand(20000 * N))  # slow"], True),
    "unpacked samples": ("sample", ["zlib.decompress(zlib.compress(bytes(100000 * N), 1))  # slow"], True),
    "records in collate": (
        "collate", ["[json.loads(json.dumps(list(range(100)))) for _ in range(50 * N)]  # slow"], True,
    ),
    "ordered batches": ("order", ["sorted(random.random() for _ in range(5000 * N))  # slow"], False),
    "gradients on the host": (
        "gradients", ["for _ in range(4 * N): np.linalg.svd(np.random.rand(40, 40))  # slow"], False,
    ),
    "loops in validation": (
        "validation", ["total = 0", "for k in range(150000 * N): total += k * k  # slow"], False,
    ),
    "pictures of an epoch": ("epoch", ["zlib.compress(np.random.bytes(1000000 * N), 9)  # slow"], False),
    "many values": ("step", ["for k in range(15 * N): self.log(f'value {k}', loss)  # slow"], False),
}  # fmt: skip
CLEAN = {
    "plain": {},
    "workers": {"workers": 1, "forward": "for _ in range(4): (torch.ones(400, 400) @ torch.ones(400, 400)).sum()"},
    "logs": {"step": 'self.log("loss", loss)'},
    "light hooks": {"callback": "self.seen = batch_idx", "epoch": 'self.log("epoch", float(self.current_epoch))'},
    "cheap samples": {"sample": "x = (x - x.mean()) / x.std()", "forward": "x = x @ torch.eye(64)"},
}


def script(n=1, workers=0, batches=60, **places):
    """Return the text of a script; each place takes one or more lines."""
    filled = {**NOTHING, **places}
    text = SCRIPT
    for place, lines in filled.items():
        lines = [lines] if isinstance(lines, str) else lines
        (indent,) = {row.index("{" + place) for row in text.splitlines() if "{" + place + "}" in row}
        text = text.replace("{" + place + "}", ("\n" + " " * indent).join(lines))
    return text.replace("{n}", str(n)).replace("{workers}", str(workers)).replace("{batches}", str(batches))
