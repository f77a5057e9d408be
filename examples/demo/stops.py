"""A run stopped twice within an epoch and resumed with another number of workers: samples seen twice or never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_turbo import ExactResume, Prefetch

SAMPLES = 64
PARTS = ((0, 5), (2, 10), (1, None))  # worker processes, and the global step at which the run is stopped


class Net(LightningModule):
    """Records the samples of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch, index):
        """Train on the numbers of the samples."""
        self.seen += batch.tolist()
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self):
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class _Save(Callback):
    """Saves a checkpoint at the global step at which the run is stopped."""

    def __init__(self, steps: int | None, path: Path) -> None:
        self.steps = steps
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Save a checkpoint at that step."""
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


def run(out: Path, ours: bool, accelerator: str = "cpu") -> dict[str, int]:
    """Train one epoch in three parts, and return how many samples were seen more than once, and how many never."""
    seen: Counter[int] = Counter()
    path = out / f"stop-{'ours' if ours else 'stock'}.ckpt"
    for part, (workers, steps) in enumerate(PARTS):
        seed_everything(0, verbose=False)
        callbacks: list[Any] = [ExactResume(), Prefetch()] if ours else []
        trainer = Trainer(
            accelerator=accelerator, max_epochs=1, max_steps=-1 if steps is None else steps, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*callbacks, _Save(steps, path)],
        )  # fmt: skip
        net = Net()
        loader = DataLoader(range(SAMPLES), 4, shuffle=True, num_workers=workers)  # pyright: ignore[reportArgumentType]
        trainer.fit(net, loader, ckpt_path=path if part else None)
        seen.update(net.seen)
    return {"twice": sum(seen[n] > 1 for n in range(SAMPLES)), "never": sum(not seen[n] for n in range(SAMPLES))}


def measure(out: Path, step: Callable[[str], Any]) -> dict[str, Any]:
    """Return the counts with and without this package."""
    step("a run that is stopped twice")
    out.mkdir(parents=True, exist_ok=True)
    return {"ours": run(out, ours=True), "stock": run(out, ours=False), "samples": SAMPLES}
