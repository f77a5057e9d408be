"""A measured training restarts from its beginning, with its counters, schedulers and learning rates."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_turbo.tune.endless import Endless


class Over(Exception):
    """Ends the run."""


class Model(BoringModel):
    """Its learning rate is a tensor, as a capturable optimizer needs, and decreases with each step."""

    def __init__(self, endless):
        super().__init__()
        self.endless, self.seen, self.rates = endless, [], set()

    def configure_optimizers(self):
        self.rate = torch.tensor(1.0)
        optimizer = torch.optim.SGD(self.parameters(), self.rate, foreach=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_start(self):
        if self.endless:
            Endless(self.trainer)

    def on_train_batch_start(self, batch, batch_idx):
        if len(self.seen) == 8:
            raise Over
        rate = self.optimizers().param_groups[0]["lr"]
        self.rates.add(rate.data_ptr())
        self.seen.append((self.current_epoch, batch_idx, self.global_step, rate.item()))


def train(model, ckpt_path=None, epochs=2):
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, limit_train_batches=2, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


FIRST = [(0, 0, 0, 1.0), (0, 1, 1, 0.5)]
SECOND = [(1, 0, 2, 0.25), (1, 1, 3, 0.125)]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_training_with_a_tensor_learning_rate_restarts_from_its_beginning(resumed, tmp_path):
    path = None
    if resumed:
        path = tmp_path / "first.ckpt"
        train(Model(endless=False), epochs=1).save_checkpoint(path)
    model = Model(endless=True)
    with pytest.raises(Over):
        train(model, path)
    assert model.seen == (SECOND * 4 if resumed else (FIRST + SECOND) * 2)
    assert len(model.rates) == 1, "a captured graph reads this tensor"
