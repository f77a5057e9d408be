"""A run whose gradients are never finite ends with an error that names the step and the module."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_turbo import ApexAMP
from lightning_turbo.errors import TurboWarning
from lightning_turbo.plugins import nonfinite
from lightning_turbo.plugins.nonfinite import NonFiniteError
from tests.plugins.classifier import LEVELS, Net, batches, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Broken(Net):
    def forward(self, x):
        return self.frozen(self.head(self.net(x) / 0.0))


class BrokenSparse(Net):
    """Its first infinite values are in a sparse tensor."""

    class Sparse(nn.Module):
        def forward(self, x):
            return (x / 0.0).to_sparse()

    def __init__(self):
        super().__init__()
        self.sparse = self.Sparse()

    def forward(self, x):
        return self.head(self.sparse(self.net(x)).to_dense())


class BrokenAlone(pl.LightningModule):
    """Has no child modules."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.sum() * self.weight / 0.0

    def training_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fused(params):
    return torch.optim.SGD(params, lr=0.1, fused=True)


@pytest.mark.parametrize(("module", "where"), [
    (Broken(), r"'head' \(Linear\)"), (Broken(fused), r"'head' \(Linear\)"), (BrokenAlone(), r"'' \(BrokenAlone\)"),
    (BrokenSparse(), r"'sparse' \(Sparse\)"),
], ids=["plain", "fused", "alone", "sparse"])  # fmt: skip
def test_repeated_overflows_end_the_run_and_name_the_step_and_the_module(module, where, monkeypatch):
    monkeypatch.setattr(nonfinite, "LOOK_EVERY", 5)
    monkeypatch.setattr(nonfinite, "LIMIT", 4)
    said = rf"least 4 consecutive optimizer steps were skipped.* at step 13\. First .* of module {where}"
    with pytest.raises(NonFiniteError, match=said):
        trainer(ApexAMP("O1", dtype=torch.float16), max_epochs=4).fit(module, batches())


def test_one_overflow_does_not_end_the_run(monkeypatch):
    monkeypatch.setattr(nonfinite, "LOOK_EVERY", 1)
    monkeypatch.setattr(nonfinite, "LIMIT", 2)
    module = Net(poison=[2, 5])
    trainer(ApexAMP("O1", dtype=torch.float16)).fit(module, batches())
    assert len(module.losses) == 8
    assert not module.head._forward_hooks


@pytest.mark.parametrize("strategy", ["auto", "turbo"])  # this strategy releases gradients in the step
@pytest.mark.parametrize("level", LEVELS)
def test_nonfinite_gradients_without_a_loss_scale_are_reported_with_the_module(level, strategy, monkeypatch):
    monkeypatch.setattr(nonfinite, "LOOK_EVERY", 2)
    monkeypatch.setattr(nonfinite, "LIMIT", 4)
    said = r"least 4 consecutive optimizer steps were made with inf or NaN.*: the output of module '(net\.0|head)'"
    with pytest.warns(TurboWarning, match=said) as caught:
        trainer(ApexAMP(level, dtype=torch.bfloat16), max_epochs=2, strategy=strategy).fit(Broken(), batches())
    assert sum(warning.category is TurboWarning for warning in caught) == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("make", "found"), [
    (lambda x: x, True), (torch.Tensor.to_sparse, True), (torch.Tensor.half, True),
    (torch.Tensor.to_sparse_csr, False),  # torch cannot look into these
], ids=["strided", "sparse", "half", "compressed rows"])  # fmt: skip
def test_nonfinite_values_are_found_in_every_layout_that_torch_supports(make, found):
    tensor = torch.tensor([[1.0, torch.inf], [0.0, 2.0]])
    assert nonfinite._is_bad(make(tensor)) is found
    assert not nonfinite._is_bad(make(tensor.clamp(max=3.0)))
