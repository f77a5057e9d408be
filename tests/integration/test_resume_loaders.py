"""Which batches a run sees that goes on from a checkpoint: those that a run without a stop sees."""

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_turbo import PrefetchDataModule, PrefetchLoader
from tests.versions import BEGINS_ONCE, unpickling

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def loader(length, seed, cls=DataLoader):
    return cls(range(length), 2, shuffle=True, generator=torch.Generator().manual_seed(seed))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"a": batch}
        self.seen.append({name: None if part is None else part.tolist() for name, part in parts.items()})
        return self.weight.square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(Callback):
    def __init__(self, path, batches, hook):
        def save(trainer, *_):
            if trainer.global_step == batches:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def run(make, base, path, *callbacks, **settings):
    class Data(base):
        def train_dataloader(self):
            return make()

    torch.manual_seed(0)
    model = Model()
    Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **settings,
    ).fit(model, datamodule=Data(), ckpt_path=path, **unpickling(True if path else None))  # fmt: skip
    return model.seen


def check(make, base, path, batches, hook="on_train_batch_end", **settings):
    straight = run(make, base, None, Save(path, batches, hook), **settings)
    assert run(make, base, path, **settings) == straight[batches:]
    return straight


@pytest.mark.parametrize("strategy", ["auto", "turbo"])
@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5])
def test_loaders_of_unequal_length(mode, batches, strategy, tmp_path):
    def make():
        return CombinedLoader({"a": loader(8, 1), "b": loader(4, 2)}, mode)

    seen = check(make, PrefetchDataModule, tmp_path / "c", batches, strategy=strategy)
    assert [batch["b"] is None for batch in seen[:4]] == [False, False, *[mode == "max_size"] * 2]


def test_a_loader_that_has_ended_without_the_datamodule(tmp_path):
    def make():
        return CombinedLoader({"a": loader(8, 1, PrefetchLoader), "b": loader(4, 2, PrefetchLoader)}, "max_size")

    check(make, LightningDataModule, tmp_path / "c", 3, strategy="turbo")


@pytest.mark.parametrize("limit", [1.0, 3])
@pytest.mark.parametrize("hook", ["on_train_batch_end", pytest.param("on_train_epoch_end", marks=BEGINS_ONCE)])
def test_an_order_from_a_generator_goes_on_after_an_epoch(limit, hook, tmp_path):
    batches = 2 * (limit if limit == 3 else 4)
    seen = check(
        lambda: loader(8, 1), PrefetchDataModule, tmp_path / "c", batches, hook,
        strategy="turbo", limit_train_batches=limit,
    )  # fmt: skip
    third = seen[batches:]
    assert third not in (seen[: len(third)], seen[len(third) : 2 * len(third)])
