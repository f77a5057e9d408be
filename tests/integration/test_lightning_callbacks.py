"""Lightning's callbacks that average, unfreeze or prune weights, together with ours."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import ApexAMP, DropBiasBeforeNorm, ExactAccumulation, GradToNone, PrefetchLoader, TurboStrategy
from tests.trainers import quiet_trainer

averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="needs Lightning 2.6")

LEVELS = ("O0", "O1", "O2", "O3")
OURS = {
    "lightning": dict,
    "turbo": lambda: {"strategy": TurboStrategy(lean=True)},
    "callbacks": lambda: {"callbacks": [GradToNone(), ExactAccumulation()]},
}


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.tail = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        self.shift = nn.Parameter(torch.full((3,), 1.001))
        self.losses = []

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.tail(self.backbone(batch[0])).float() + self.shift.float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.tail(self.backbone(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Recorder(pl.Callback):
    """Keeps the weights that the optimizer updates, after each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        groups = trainer.optimizers[0].param_groups
        self.steps.append([p.detach().float().clone() for group in groups for p in group["params"]])


class Finetuning(BackboneFinetuning):
    def __init__(self):
        super().__init__(
            unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, backbone_initial_lr=0.005, train_bn=False
        )

    def on_fit_start(self, trainer, module):
        super().on_fit_start(trainer, module)
        if len(trainer.optimizers[0].param_groups) > 1:  # Lightning leaves the backbone of a resumed run frozen
            self.make_trainable(module.backbone)


class Ema(averaging.WeightAveraging):
    def __init__(self):
        super().__init__(avg_fn=get_ema_avg_fn(0.7), use_buffers=False)


def loader(kind=DataLoader):
    x = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return kind(TensorDataset(x, (x.mean((1, 2, 3)) * 9).long().clamp(-1, 1) + 1), batch_size=4)


def fit(net, *callbacks, level=None, ours="lightning", epochs=3, ckpt_path=None, **settings):
    added = {"limit_val_batches": 0, **OURS[ours](), **settings}
    added["callbacks"] = [*callbacks, *added.get("callbacks", [])]
    plugins = [ApexAMP(level, dtype=torch.bfloat16)] if level else None
    trainer = quiet_trainer(max_epochs=epochs, plugins=plugins, **added)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ExactAccumulation has no effect")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        kind = DataLoader if ours == "lightning" else PrefetchLoader
        trainer.fit(net, loader(kind), loader(), ckpt_path=ckpt_path)
    return trainer


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_moving_average_averages_the_weights_that_the_optimizer_updates(level, ours):
    net, recorder = Net(), Recorder()
    fit(net, recorder, Ema(), level=level, ours=ours, limit_val_batches=2)
    average = get_ema_avg_fn(0.7)
    expected = recorder.steps[0]
    for weights in recorder.steps[1:]:
        expected = [average(e, w, 1) for e, w in zip(expected, weights, strict=True)]
    result = [p.detach() for p in net.parameters()]
    assert all(p.dtype is torch.float32 for p in result)
    if level == "O3":  # no master weights: Lightning's swaps at each validation round the average to half precision
        assert all(torch.allclose(r, e, rtol=0.02, atol=0.01) for r, e in zip(result, expected, strict=True))
        return
    assert same(result, expected)
    # Validation uses the average and does not change training.
    alone = Net()
    fit(alone, level=level)
    assert net.losses == alone.losses


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_moving_average_stays_finite_over_skipped_steps(level):
    """A skipped step counts as a step without a change, as with Lightning's 16-mixed."""

    class Overflowing(Net):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (torch.inf if index in (0, 3) else 1.0)

    net, recorder, plugin = Overflowing(), Recorder(), ApexAMP(level, dtype=torch.float16)
    ema = averaging.EMAWeightAveraging(decay=0.7, use_buffers=False)
    quiet_trainer(max_epochs=2, plugins=[plugin], callbacks=[recorder, ema], limit_val_batches=0).fit(
        net, loader(), loader()
    )
    assert plugin.scaler.skipped_steps == 4
    expected, average = recorder.steps[0], get_ema_avg_fn(0.7)
    assert same(expected, [p.detach() for p in Net().parameters()])
    for weights in recorder.steps[1:]:
        expected = [average(e, w, 1) for e, w in zip(expected, weights, strict=True)]
    torch.testing.assert_close([p.detach() for p in net.parameters()], expected)


@pytest.mark.parametrize("validate", [0, 2])
@pytest.mark.parametrize("level", [None, "O0", "O2"])
def test_a_moving_average_includes_buffers(level, validate):
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.Conv2d(1, 1, 1))  # half precision at O2

        def training_step(self, batch, index):
            normed = self.norm(batch[0] * (index + 1))
            means.append(self.norm[0].running_mean.detach().float().clone())
            dtypes.add(self.norm[0].running_mean.dtype)
            return super().training_step((normed, batch[1]), index)

    means, dtypes, net = [], set(), Normed()
    fit(net, averaging.WeightAveraging(avg_fn=get_ema_avg_fn(0.7)), level=level, limit_val_batches=validate)
    expected = means[0]
    for mean in means[1:]:
        expected = 0.7 * expected + 0.3 * mean
    assert dtypes == {torch.float32}
    assert torch.allclose(net.norm[0].running_mean, expected, rtol=0.02, atol=1e-3)
    assert not torch.allclose(expected, means[-1], rtol=0.05)


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("level", LEVELS)
def test_unfreezing_a_backbone_and_resuming_from_a_checkpoint(tmp_path, level, ours):
    whole, first, second = Net(), Net(), Net()
    trainer = fit(whole, Finetuning(), level=level, ours=ours, epochs=4)
    groups = [group["params"] for group in trainer.optimizers[0].param_groups]
    assert [len(group) for group in groups] == [5, 2]
    assert {id(p) for group in groups for p in group} == {id(p) for p in whole.parameters()}
    assert not torch.equal(whole.backbone[0].weight, Net().backbone[0].weight)
    fit(first, Finetuning(), level=level, ours=ours, epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    fit(second, Finetuning(), level=level, ours=ours, epochs=4, ckpt_path=tmp_path / "last.ckpt")
    assert first.losses + second.losses == whole.losses
    assert same(second.state_dict().values(), whole.state_dict().values())


@pytest.mark.parametrize("make", [Ema, lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)], ids=["ema", "swa"])
@pytest.mark.parametrize(
    "level", ["O2", "O3", *(pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O1"))]
)
def test_weight_averaging_resumes_from_a_checkpoint(tmp_path, level, make):
    whole, first, second = Net(), Net(), Net()
    settings = {"level": level, "ours": "turbo", "epochs": 4, "limit_val_batches": 2}
    fit(whole, make(), **settings)
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(first, make(), checkpoint, enable_checkpointing=True, **settings)
    fit(second, make(), ckpt_path=tmp_path / "epoch=1.ckpt", **settings)
    assert second.losses == whole.losses[10:]
    assert same(second.state_dict().values(), whole.state_dict().values())


def test_gradients_of_an_unfrozen_backbone_are_released():
    held = {}
    for callbacks in ((), (GradToNone(),)):
        net, rows = Net(), held.setdefault(len(callbacks), [])
        net.backbone.register_forward_pre_hook(
            lambda *_, net=net, rows=rows: rows.append([p.grad is None for p in net.parameters()])
        )
        fit(net, Finetuning(), *callbacks)
    assert not any(held[0][-1])  # including those of the backbone
    assert all(all(row) for row in held[1])


def test_dropping_biases_after_an_average_has_copied_them_is_refused():
    with pytest.raises(ValueError, match=r"DropBiasBeforeNorm.*before Ema"):
        fit(Net(), Ema(), DropBiasBeforeNorm("backbone"))
    net = Net()
    fit(net, DropBiasBeforeNorm("backbone"), Ema())
    assert net.backbone[0].bias is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_during_training_holds_the_exact_weights_of_the_module(tmp_path, level):
    recorder = Recorder()
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    fit(Net(), recorder, checkpoint, level=level, enable_checkpointing=True)
    state = torch.load(tmp_path / "step=7.ckpt", weights_only=False)["state_dict"]
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
    assert same([state[name] for name, _ in Net().named_parameters()], recorder.steps[6])
