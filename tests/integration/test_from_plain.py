"""docs/from-plain-pytorch.md: each plain loop and what becomes of it give the same numbers, bit for bit."""

import re
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_turbo
from lightning_turbo import ApexAMP

PAGE = Path(lightning_turbo.__file__).parent.parent / "docs" / "from-plain-pytorch.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def run(needle):
    """Run the one code block that contains ``needle`` and return its variables."""
    (code,) = [block for block in BLOCKS if needle in block]
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the block prints
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return names


class Regression(LightningModule):
    """The network of the page, under a Trainer."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def test_loop_and_trainer_end_with_the_same_weights():
    before = run("amp.initialize")["weights"]
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    net = Regression()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        plugins=[ApexAMP("O2")], gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(net, DataLoader(data, batch_size=16))
    after = list(net.parameters())
    assert len(before) == len(after) == 6
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def test_all_loaders_give_the_same_batches():
    first = run("class DataLoaderX")["batches"]
    assert sorted(number for batch in first for number in batch) == list(range(20))
    assert run("PrefetchLoader(range")["batches"] == first


def test_every_code_block_is_tested():
    tried = ("amp.initialize", "class DataLoaderX", "PrefetchLoader(range")
    assert [sum(needle in block for needle in tried) for block in BLOCKS] == [1] * len(tried)
