"""The turbo strategies: the same results as Lightning's own, with every part on, off, and given back."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import AmpCheckpointIO, ApexAMP, PrefetchLoader, TurboDDPStrategy, TurboStrategy
from tests.trainers import quiet_trainer
from tests.versions import unpickling


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(model, strategy, **kwargs):
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 1, 6, 6, generator=g), torch.randint(0, 3, (32,), generator=g))
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, **kwargs)
    trainer.fit(model, DataLoader(data, batch_size=8))
    return trainer


@pytest.mark.parametrize("settings", [
    {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}, {"precision": "64-true"},
    {"precision": "bf16-true"}, *({"level": level} for level in ("O0", "O1", "O2", "O3")),
], ids=str)  # fmt: skip
def test_turbo_computes_what_the_default_computes(settings):
    level, double = settings.get("level"), settings.get("precision") == "64-true"
    settings = {name: value for name, value in settings.items() if name != "level"}
    ends = []
    for strategy in ("auto", "turbo", TurboStrategy(release_gradients=False, cudnn_benchmark=None)):
        model = Net().double() if double else Net()
        fit(model, strategy, **settings, plugins=[ApexAMP(level)] if level else None)
        ends.append((model.losses, [p.detach().clone() for p in model.parameters()]))
    for losses, parameters in ends[1:]:
        assert losses == ends[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, ends[0][1], strict=True))


EAGER = {"backend": "eager"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("level", [None, "O0", "O1", "O2"])
def test_a_network_is_compiled_in_place_for_the_run(level):
    ends = []
    for compiled in (None, {"backend": "aot_eager"}):
        model, seen = Net(), []
        model.on_train_end = lambda model=model, seen=seen: seen.append(model.net._compiled_call_impl is not None)
        plugins = [] if level is None else [ApexAMP(level, dtype=torch.bfloat16)]
        trainer = fit(model, TurboStrategy(compile=compiled), plugins=plugins, accumulate_grad_batches=2)
        assert seen == [compiled is not None]
        assert model.net._compiled_call_impl is None
        ends.append((model, list(trainer.strategy.lightning_module_state_dict())))
    assert ends[0][1] == ends[1][1]
    # Rounded as the plain network but for where the compiler puts casts.
    assert ends[1][0].losses == pytest.approx(ends[0][0].losses, rel=1e-5 if level in (None, "O0") else 2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_run_goes_on_from_a_plain_one_and_back(tmp_path):
    def train(path=None, compiled=None, epochs=2):
        model, data = Net(), TensorDataset(torch.randn(16, 1, 6, 6), torch.arange(16) % 3)
        trainer = quiet_trainer(strategy=TurboStrategy(compile=compiled), max_epochs=epochs)
        trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=path, **unpickling(False))
        return trainer, model

    whole = train(epochs=4)[1]
    train(compiled=EAGER)[0].save_checkpoint(tmp_path / "compiled")
    train(tmp_path / "compiled", epochs=3)[0].save_checkpoint(tmp_path / "plain")
    rest = train(tmp_path / "plain", compiled=EAGER, epochs=4)[1]
    assert rest.losses == whole.losses[-2:]
    assert all(torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True))


def test_the_memory_format_is_set():
    seen, model, reference = [], Net(), Net()
    model.on_train_start = lambda: seen.append(model.net[0].weight.is_contiguous(memory_format=torch.channels_last))
    model.net[0] = nn.Conv2d(1, 4, 3)
    reference.net[0].load_state_dict(model.net[0].state_dict())
    fit(model, TurboStrategy(memory_format="channels_last"))
    fit(reference, "auto")
    assert seen == [True]
    assert model.losses == pytest.approx(reference.losses, abs=1e-5)


def test_gradients_are_released_after_the_step_and_switches_are_put_back():
    class Look(pl.Callback):
        held = None

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            self.held = [p.grad for p in module.parameters()] if index == 3 else self.held

    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    look = Look()
    trainer = fit(Net(), TurboStrategy(matmul_precision="high"), callbacks=[look])
    assert all(g is None for g in look.held)
    assert (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()) == before
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    fit(Net(), TurboStrategy(release_gradients=False), callbacks=[look])
    assert any(g is not None for g in look.held)


def test_what_has_no_meaning_here_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr("lightning_turbo.strategies.turbo.rank_zero_info", said.append)
    fit(Net(), "turbo")
    assert said == ["turbo: no effect on cpu: device_prefetch, cudnn_benchmark."]


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: TurboStrategy(memory_format="last"), ValueError, "memory_format: expected None, 'channels_last' or 'con"),
    (lambda: TurboStrategy(device_prefetch="yes"), TypeError, "device_prefetch='yes': expected True or False"),
    (lambda: TurboStrategy(prefetch_batches=0), ValueError, "prefetch_batches: expected an integer of 1 or more"),
    (lambda: TurboStrategy(prefetch_batches=1.5), TypeError, "prefetch_batches: expected an integer of 1 or more"),
    (lambda: TurboStrategy(cudnn_benchmark=1), TypeError, "cudnn_benchmark=1: expected True, False or None"),
    (lambda: TurboStrategy(matmul_precision="low"), ValueError, "matmul_precision: expected None, 'highest', 'high'"),
    (lambda: TurboStrategy(lean_step=1), TypeError, "lean_step=1: expected True, False or None"),
    (lambda: TurboStrategy(compile=True), TypeError, "compile: expected None, 'network', 'blocks' or a dict"),
    (lambda: TurboDDPStrategy(sigterm_every=0), ValueError, "sigterm_every: expected an integer of 1 or more, got 0"),
    (lambda: TurboDDPStrategy(grad_compression="int8"), ValueError, "grad_compression: expected None, 'bf16' or"),
    (lambda: TurboDDPStrategy(static_graph=1), TypeError, "static_graph=1: expected True or False"),
    (lambda: TurboDDPStrategy(None, None, None, None, None, None, print, grad_compression="fp16"), ValueError,
     "Pass either grad_compression or ddp_comm_hook"),
    (lambda: TurboStrategy().state_key, TypeError,  # which fit asks of callbacks
     "callbacks: expected callbacks, got TurboStrategy. Pass it as Trainer(strategy=...)."),
    (lambda: pl.Trainer(accelerator="cpu", callbacks=[ApexAMP()]), TypeError,
     "callbacks: expected callbacks, got ApexAMP. Pass it as Trainer(plugins=[...])."),
])  # fmt: skip
def test_bad_settings_are_refused_in_words(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(("settings", "text"), [
    ({"devices": 2}, r"expected one device, got 2\. Pass strategy='turbo_ddp'"),
    ({"devices": 1, "num_nodes": 2}, "expected num_nodes=1, got num_nodes=2"),
])  # fmt: skip
def test_several_devices_or_machines_are_refused_by_turbo(settings, text):
    with pytest.raises(MisconfigurationException, match=text):
        pl.Trainer(accelerator="cpu", strategy="turbo", logger=False, **settings)


def connected(strategy, **settings):
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, **settings)
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(Net())
    trainer.lightning_module.trainer = trainer
    return trainer


def test_bfloat16_compression_on_the_cpu_is_refused_before_the_first_step():
    trainer = connected(TurboDDPStrategy(grad_compression="bf16"))
    with pytest.raises(MisconfigurationException, match="grad_compression='bf16': expected CUDA with NCCL, got cpu"):
        trainer.strategy.setup(trainer)


def test_a_static_graph_with_accumulated_gradients_is_refused_before_the_first_step():
    scheduled, later = ([GradientAccumulationScheduler({epoch: 2})] for epoch in (0, 1))
    for settings in ({"accumulate_grad_batches": 2}, {"callbacks": scheduled}):
        trainer = connected(TurboDDPStrategy(static_graph=True), **settings)
        with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=1 with static_graph=True, got 2"):
            trainer.strategy.on_train_start()
    connected(TurboDDPStrategy(static_graph=True), callbacks=later).strategy.on_train_start()  # the graph is known then


@pytest.mark.parametrize("make", [TurboStrategy, TurboDDPStrategy])
def test_a_checkpoint_io_is_given_once_in_either_place(make):
    own = AsyncCheckpointIO()
    assert isinstance(make().checkpoint_io, AmpCheckpointIO)
    for strategy, plugins in ((make(checkpoint_io=own), []), (make(), [own]), (make.strategy_name, [own])):
        held = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, plugins=plugins, logger=False).strategy
        assert isinstance(held.checkpoint_io, AmpCheckpointIO)
        assert held.checkpoint_io.checkpoint_io is own
    mine = AmpCheckpointIO()
    assert pl.Trainer(accelerator="cpu", strategy=make(), plugins=[mine]).strategy.checkpoint_io is mine
    with pytest.raises(MisconfigurationException, match="checkpoint_io set through both"):
        pl.Trainer(accelerator="cpu", strategy=make(checkpoint_io=own), plugins=[mine])
    with pytest.raises(TypeError, match="checkpoint_io: expected a CheckpointIO of Lightning or None, got 'disk'"):
        make(checkpoint_io="disk")


@pytest.mark.parametrize("strategy", [TurboStrategy, TurboDDPStrategy])
def test_a_trainer_can_be_pickled_and_copied(strategy):
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy(prefetch_batches=3), logger=False)
    given_back = []
    trainer.strategy._borrowed.callback(lambda: given_back.append(True))  # as in a run
    for twin in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert type(twin.strategy) is strategy
        assert twin.strategy.prefetch_batches == 3
        twin.strategy._borrowed.close()
    assert given_back == []


@pytest.mark.parametrize("step", [5, 6, 7, 8])
def test_the_rest_of_an_epoch_accumulates_what_its_scheduler_says(step, tmp_path):
    data = TensorDataset(torch.randn(40, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)
    path = tmp_path / "step.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == step and not path.exists():
                trainer.save_checkpoint(path)

    def train(**resume):
        model = Net()
        trainer = quiet_trainer(
            strategy="turbo", max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}), Save()]
        )
        trainer.fit(model, PrefetchLoader(data, batch_size=8), **resume)
        return model, trainer.global_step

    whole, steps = train()
    rest, at = train(ckpt_path=path, **unpickling(False))
    assert (at, rest.losses) == (steps, whole.losses[-len(rest.losses) :])
    assert all(torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True))
