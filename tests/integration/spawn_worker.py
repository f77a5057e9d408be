"""Two ranks that the Trainer spawns itself, under turbo_ddp and under ddp_spawn; run by test_turbo.py."""

import atexit
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import TurboDDPStrategy


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(6, 3)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        self.log("steps", float(self.trainer.global_step + 1))
        return loss

    def on_fit_end(self):
        # A thread of gloo may hold the last tensor still, see tests/ranks.py. Lightning has more to say until the end.
        atexit.register(torch.distributed.destroy_process_group)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


SETTINGS = {
    "stock": lambda: "ddp_spawn",
    "turbo": lambda: TurboDDPStrategy(start_method="spawn"),
}


def main():
    folder = Path(sys.argv[1])
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 6, generator=generator), torch.arange(24) % 3)
    for name, strategy in SETTINGS.items():
        model = Net()
        start = model.net.weight.detach().clone()
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy(), max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=4, shuffle=False))
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        torch.save({"module": model.state_dict(), "metrics": metrics, "start": start}, folder / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
