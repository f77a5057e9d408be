"""Two ranks under turbo_ddp and under ddp; run by test_turbo.py."""

import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import (
    ApexAMP,
    EffectiveBatchSize,
    MemoryFormat,
    PrefetchLoader,
    PrefetchNextEpoch,
    TurboDDPStrategy,
)
from lightning_turbo.callbacks import memory_format
from lightning_turbo.nn.memory_format import FormatTimes
from tests.versions import unpickling


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(batch[1].tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1] % 3)

    def on_train_end(self):
        ddp = self.trainer.model
        self.ddp = {name: getattr(ddp, name) for name in ("static_graph", "gradient_as_bucket_view")}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


SETTINGS = {
    "stock": lambda: "ddp",
    "turbo": lambda: "turbo_ddp",
    "stock-1": lambda: "ddp",
    "static-1": lambda: TurboDDPStrategy(static_graph=True, gradient_as_bucket_view=False),
    "fp16": lambda: TurboDDPStrategy(grad_compression="fp16"),
    "sized": lambda: "turbo_ddp",
    "compiled": lambda: TurboDDPStrategy(compile={"backend": "eager"}),
    "turbo-O2": lambda: "turbo_ddp",
    "stock-O2": lambda: "ddp",
}


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.arange(48))
    for name, strategy in SETTINGS.items():
        pl.seed_everything(0, verbose=False)
        window = 1 if name.endswith("1") or name == "sized" else 2
        model = Net()
        sized = EffectiveBatchSize(16, None)  # 4 samples x 2 ranks x 2
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy(), max_epochs=2, accumulate_grad_batches=window,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            plugins=[ApexAMP("O2", dtype=torch.bfloat16)] if name.endswith("O2") else None,
            callbacks=[sized] if name == "sized" else None,
        )  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
        result = {"module": model.state_dict(), "seen": model.seen, "ddp": model.ddp, "steps": trainer.global_step}
        torch.save(result, folder / f"{name}.{rank}")
    go_on(data, folder, rank)
    torch.save(own_orders(data, folder.parent, rank), folder / f"orders.{rank}")
    torch.save(formats(rank), folder / f"formats.{rank}")


def go_on(data, folder, rank):
    """Train two epochs with worker processes, and the second again from the checkpoint of the first."""
    for name in ("workers", "again"):
        model = Net()
        torch.manual_seed(rank + 10 * (name == "again"))  # dropout differs from rank to rank
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="turbo_ddp", max_epochs=2, logger=False,
            callbacks=[ModelCheckpoint(folder.parent, filename="{epoch}", save_top_k=-1)],
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
        ckpt = folder.parent / "epoch=0.ckpt" if name == "again" else None
        trainer.fit(model, loader, ckpt_path=ckpt, **unpickling(True))
        torch.save({"module": model.state_dict(), "seen": model.seen}, folder / f"{name}.{rank}")


def own_orders(data, folder, rank):
    """Return the batches of each rank's own order, and of runs from checkpoints in and at the end of an epoch."""
    seen = []
    for step in (None, 8, 12):
        model = Net()
        generator = torch.Generator().manual_seed(rank + 10 * (step or 0))
        saves = ModelCheckpoint(folder, filename="own-{step}", every_n_train_steps=4, save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="turbo_ddp", max_epochs=2, use_distributed_sampler=False,
            callbacks=[saves, PrefetchNextEpoch()], logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        loader = PrefetchLoader(data, batch_size=4, shuffle=True, generator=generator)
        ckpt = step and folder / f"own-step={step}.ckpt"
        trainer.fit(model, loader, ckpt_path=ckpt, **unpickling(True if ckpt else None))
        seen.append(model.seen)
    return seen


class Images(pl.LightningModule):
    example_input_array = torch.zeros(2, 2, 6, 6)

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(2, 2, 3)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def formats(rank):
    """Whether the weights are channels last where rank 0 measures that to be faster, and rank 1 the contrary."""
    best = ("channels_last", "contiguous")[rank]
    memory_format.measure_memory_format = lambda *_, **__: FormatTimes(best, {})
    found = []
    for strategy, callbacks in (("ddp", [MemoryFormat("measure")]), (TurboDDPStrategy(memory_format="measure"), [])):
        model = Images()
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, DataLoader(torch.randn(4, 2, 6, 6), batch_size=2))
        found.append(model.net.weight.is_contiguous(memory_format=torch.channels_last))
    return found


if __name__ == "__main__":
    main()
