"""The turbo strategies: the same results as Lightning's, with every part on or off, and restored settings."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_turbo import ApexAMP, AtomicCheckpointIO, ExactResume, PrefetchLoader, TurboDDPStrategy, TurboStrategy
from lightning_turbo._trainer import supports_lean_loop
from tests.registry import make_data, make_model
from tests.trainers import quiet_trainer
from tests.versions import unpickling


def net():
    return make_model(pl, optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))


def fit(model, strategy="auto", path=None, **settings):
    trainer = quiet_trainer(strategy=strategy, **{"max_epochs": 2, **settings})
    trainer.fit(model, **make_data(None), ckpt_path=path, **unpickling(False))
    return trainer


def same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("settings", [
    {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}, {"precision": "64-true"},
    {"precision": "bf16-true"},
], ids=str)  # fmt: skip
def test_turbo_computes_the_same_as_the_default_strategy(settings):
    models = []
    for strategy in ("auto", "turbo", TurboStrategy(release_gradients=False)):
        models.append(net().double() if settings.get("precision") == "64-true" else net())
        fit(models[-1], strategy, **settings)
        assert models[-1].losses == models[0].losses
        same(models[-1], models[0])


EAGER = {"backend": "eager"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "level", [None, *(pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O1")), "O2"]
)
def test_a_network_is_compiled_in_place_for_the_run(level):
    ends = []
    for compiled in (None, {"backend": "aot_eager"}):
        model, seen = net(), []
        model.on_train_end = lambda model=model, seen=seen: seen.append(model.net._compiled_call_impl is not None)
        plugins = [] if level is None else [ApexAMP(level, dtype=torch.bfloat16)]
        trainer = fit(model, TurboStrategy(compile=compiled), plugins=plugins, accumulate_grad_batches=2)
        assert seen == [compiled is not None]
        assert model.net._compiled_call_impl is None
        ends.append((model, list(trainer.strategy.lightning_module_state_dict())))
    assert ends[0][1] == ends[1][1]
    # The rounding is that of the plain network, except where the compiler moves casts.
    assert ends[1][0].losses == pytest.approx(ends[0][0].losses, rel=1e-5 if level in (None, "O0") else 2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_run_resumes_from_a_plain_one_and_back(tmp_path):
    def train(path=None, compiled=None, epochs=2):
        trainer = fit(model := net(), TurboStrategy(compile=compiled), path, max_epochs=epochs)
        trainer.save_checkpoint(tmp_path / "last")
        return model

    whole = train(epochs=4)
    train(compiled=EAGER)
    train(tmp_path / "last", epochs=3)
    rest = train(tmp_path / "last", compiled=EAGER, epochs=4)
    assert rest.losses == whole.losses[-5:]
    same(rest, whole)


def test_gradients_are_released_before_the_forward_pass():
    held, model = [], net()
    model.net.register_forward_pre_hook(lambda *_: held.append(any(p.grad is not None for p in model.parameters())))
    trainer = fit(model, TurboStrategy())
    assert not held[3]
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    held.clear()
    fit(model, TurboStrategy(release_gradients=False))
    assert held[3]


def test_nothing_is_said_of_defaults_without_effect_but_a_version_that_is_not_known(monkeypatch):
    said = []
    monkeypatch.setattr("lightning_turbo.strategies.turbo.rank_zero_info", said.append)
    fit(net(), "turbo")
    lean = f"turbo: lean off: the training loop of Lightning {pl.__version__} was not compared with the lean one."
    assert said == [lean] * (not supports_lean_loop())


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: TurboStrategy(device_prefetch="yes"), TypeError, "device_prefetch='yes': expected True or False"),
    (lambda: TurboStrategy(device_prefetch=None), TypeError, "device_prefetch=None: expected True or False"),
    (lambda: TurboStrategy(lean=1), TypeError, "lean=1: expected True, False or None"),
    (lambda: TurboStrategy(compile=True), TypeError, "compile: expected None, 'network', 'blocks' or a dict"),
    (lambda: TurboStrategy(exact_resume=None), TypeError, "exact_resume=None: expected True or False"),
    (lambda: TurboStrategy(exact_resume=1), TypeError, "exact_resume=1: expected True or False"),
    (lambda: TurboStrategy(device_prefech=True), TypeError, "unexpected keyword argument 'device_prefech'"),
    (lambda: TurboStrategy().state_key, TypeError,  # which fit asks of callbacks
     "callbacks: expected callbacks, got TurboStrategy. Pass it as Trainer(strategy=...)."),
    (lambda: ApexAMP().state_key, TypeError,
     "callbacks: expected callbacks, got ApexAMP. Pass it as Trainer(plugins=[...])."),
])  # fmt: skip
def test_invalid_settings_are_refused_with_an_explanation(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(("settings", "text"), [
    ({"devices": 2}, r"expected one device, got 2\. Pass strategy='turbo_ddp'"),
    ({"devices": 1, "num_nodes": 2}, "expected num_nodes=1, got num_nodes=2"),
])  # fmt: skip
def test_turbo_refuses_several_devices_or_machines(settings, text):
    with pytest.raises(MisconfigurationException, match=text):
        pl.Trainer(accelerator="cpu", strategy="turbo", logger=False, **settings)


@pytest.mark.parametrize("make", [TurboStrategy, TurboDDPStrategy])
def test_a_checkpoint_io_may_be_given_only_once(make):
    own = AsyncCheckpointIO()
    assert type(make().checkpoint_io) is AtomicCheckpointIO
    for strategy, plugins in ((make(checkpoint_io=own), []), (make(), [own]), (make.strategy_name, [own])):
        held = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, plugins=plugins, logger=False).strategy
        assert held.checkpoint_io is own
        assert type(own.checkpoint_io) is AtomicCheckpointIO
    with pytest.raises(MisconfigurationException, match="checkpoint_io set through both"):
        pl.Trainer(accelerator="cpu", strategy=make(checkpoint_io=own), plugins=[AtomicCheckpointIO()])


@pytest.mark.parametrize("adds", [True, False])
def test_exact_resume_is_added_on_request(adds):
    trainer = fit(net(), TurboStrategy(exact_resume=adds), max_epochs=1)
    assert any(isinstance(callback, ExactResume) for callback in trainer.callbacks) == adds


@pytest.mark.parametrize("strategy", [TurboStrategy, TurboDDPStrategy])
def test_a_trainer_can_be_pickled_and_copied(strategy):
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy(compile="blocks"), logger=False)
    given_back = []
    trainer.strategy._cleanup.callback(lambda: given_back.append(True))  # as during a run
    for twin in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert type(twin.strategy) is strategy
        assert twin.strategy.compile == "blocks"
        twin.strategy._cleanup.close()
    assert given_back == []


@pytest.mark.parametrize("step", [5, 6, 7, 8])
def test_a_resumed_epoch_accumulates_as_its_scheduler_says(step, tmp_path):
    data, path = make_data(None)["train_dataloaders"].dataset, tmp_path / "step.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == step and not path.exists():
                trainer.save_checkpoint(path)

    def train(**resume):
        callbacks = [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}), Save()]
        trainer = quiet_trainer(strategy="turbo", max_epochs=3, callbacks=callbacks)
        trainer.fit(model := net(), PrefetchLoader(data, batch_size=8), **resume)
        return model, trainer.global_step

    whole, steps = train()
    rest, at = train(ckpt_path=path, **unpickling(False))
    assert (at, rest.losses) == (steps, whole.losses[-len(rest.losses) :])
    same(rest, whole)
