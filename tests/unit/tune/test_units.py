"""Loaders and optimizers that a callback sets up do what those do that are set up by hand."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, DistributedSampler

from lightning_turbo import FusedOptimizers, Prefetch, PrefetchLoader
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


class Module(LightningModule):
    def __init__(self, optimizer, fails=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 2)
        self.optimizer, self.fails, self.seen, self.loaders = optimizer, fails, [], []

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise OSError("no more")
        self.seen.append(batch)
        self.loaders = [self.trainer.train_dataloader]
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.net.parameters())

    def train_dataloader(self):
        torch.manual_seed(1)
        return DataLoader(torch.arange(32.0).reshape(8, 4), 2, shuffle=True)


def adam(parameters, **options):
    return torch.optim.Adam(parameters, lr=0.1, **options)


def fit(module, *callbacks, times=1):
    trainer = quiet_trainer(max_epochs=2, callbacks=list(callbacks))
    try:
        for _ in range(times):
            trainer.fit(module)
    finally:
        assert "process_dataloader" not in vars(trainer.strategy)
    return module


@pytest.mark.parametrize("settings", [{"num_workers": 1}, {}])
def test_a_run_that_resumes_has_the_order_of_one_that_never_stopped(settings, tmp_path):
    data = torch.arange(32.0).reshape(8, 4)

    def go_on(epochs, path=None):
        module = Module(adam)
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=1, rank=0))
        trainer = quiet_trainer(max_epochs=epochs, callbacks=[Prefetch(**settings)])
        trainer.fit(module, loader, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module.seen

    whole = go_on(3)
    parts = go_on(1) + go_on(2, tmp_path / "last.ckpt") + go_on(3, tmp_path / "last.ckpt")
    assert torch.equal(torch.stack(parts), torch.stack(whole))


class Puts(Callback):
    """Puts a function of its own in place of a method of the strategy, and leaves it there."""

    def setup(self, trainer, pl_module, stage):
        process = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = self.own = lambda loader: process(loader)


@pytest.mark.parametrize("first", [True, False])
def test_what_another_put_on_the_strategy_stays(first):
    other, settings, module = Puts(), Prefetch(), Module(adam)
    trainer = quiet_trainer(max_epochs=1, callbacks=[other, settings] if first else [settings, other])
    trainer.fit(module)
    assert trainer.strategy.process_dataloader is other.own
    assert isinstance(module.loaders[0], PrefetchLoader)
    loader = module.train_dataloader()
    assert trainer.strategy.process_dataloader(loader) is loader  # the settings ended with the run


def test_two_of_them_leave_nothing():
    module = fit(Module(adam), Prefetch(num_workers=1), Prefetch(), times=2)
    assert isinstance(module.loaders[0], PrefetchLoader)
    assert module.loaders[0].num_workers == 1


def test_nothing_is_left_after_an_error():
    with pytest.raises(OSError, match="no more"):
        fit(Module(adam, fails=True), Prefetch())


@pytest.mark.parametrize("times", [1, 2])
def test_a_fused_step_is_that_of_the_constructor(times):
    made = fit(Module(adam), FusedOptimizers(), times=times)
    asked = fit(Module(lambda parameters: adam(parameters, fused=True)), times=times)
    assert torch.equal(made.net.weight, asked.net.weight)


def test_an_optimizer_that_cannot_be_fused_is_told():
    with pytest.warns(NoEffectWarning, match="no optimizer is an Adam, AdamW, SGD or Adagrad of torch"):
        fit(Module(torch.optim.RMSprop), FusedOptimizers())
