"""The turbo strategies: the same results as Lightning's own, with every part on, off, and given back."""

import copy
import pickle
from pathlib import Path

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
from tests.ranks import run_ranks
from tests.versions import unpickling

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
WORKER = Path(__file__).with_name("turbo_worker.py")


class Net(pl.LightningModule):
    def __init__(self, compiled=False):
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        self.net = torch.compile(net, backend="eager") if compiled else net
        self.example_input_array = torch.zeros(4, 1, 6, 6)
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
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **kwargs,
    )  # fmt: skip
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
        model.example_input_array = None
        fit(model, strategy, **settings, plugins=[ApexAMP(level)] if level else None)
        ends.append((model.losses, [p.detach().clone() for p in model.parameters()]))
    for losses, parameters in ends[1:]:
        assert losses == ends[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, ends[0][1], strict=True))


def test_turbo_takes_a_compiled_model():
    plain, compiled = Net(), Net(compiled=True)
    fit(plain, "turbo")
    fit(compiled, "turbo")
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)


COMPILED = {"network": {"backend": "aot_eager"}, "eager": {"backend": "eager"}}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("level", [None, "O0", "O1", "O2"])
def test_a_network_is_compiled_in_place_for_the_run(level, how):
    ends = []
    for compiled in (None, COMPILED[how]):
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
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=TurboStrategy(compile=compiled), max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=path, **unpickling(False))
        return trainer, model

    eager = COMPILED["eager"]
    whole = train(epochs=4)[1]
    train(compiled=eager)[0].save_checkpoint(tmp_path / "compiled")
    train(tmp_path / "compiled", epochs=3)[0].save_checkpoint(tmp_path / "plain")
    rest = train(tmp_path / "plain", compiled=eager, epochs=4)[1]
    assert rest.losses == whole.losses[-2:]
    assert all(torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True))


def test_a_compiled_network_is_put_back_after_an_error():
    model = Net()
    model.on_train_start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(model, TurboStrategy(compile=COMPILED["eager"]))
    assert model.net._compiled_call_impl is None


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
    (lambda: TurboStrategy(memory_format="last"), ValueError, "memory_format: expected None, 'measure', 'con"),
    (lambda: TurboStrategy(device_prefetch="yes"), TypeError, "device_prefetch='yes': expected True or False"),
    (lambda: TurboStrategy(prefetch_batches=0), ValueError, "prefetch_batches: expected an integer of at least 1"),
    (lambda: TurboStrategy(cudnn_benchmark=1), TypeError, "cudnn_benchmark=1: expected True, False or None"),
    (lambda: TurboStrategy(matmul_precision="low"), ValueError, "matmul_precision: expected None, 'highest', 'high'"),
    (lambda: TurboStrategy(lean_step=1), TypeError, "lean_step=1: expected True, False or None"),
    (lambda: TurboStrategy(lean_logging="yes"), TypeError, "lean_logging='yes': expected True, False or None"),
    (lambda: TurboStrategy(compile="all"), ValueError, "compile: expected None, 'network', 'blocks' or a dict"),
    (lambda: TurboStrategy(compile=True), TypeError, "compile: expected None, 'network', 'blocks' or a dict"),
    (lambda: TurboDDPStrategy(sigterm_every=0), ValueError, "sigterm_every: expected an integer of at least 1, got 0"),
    (lambda: TurboDDPStrategy(grad_compression="int8"), ValueError, "grad_compression: expected None, 'bf16' or"),
    (lambda: TurboDDPStrategy(static_graph=1), TypeError, "static_graph=1: expected True or False"),
    (lambda: TurboDDPStrategy(gradient_as_bucket_view="no"), TypeError, "gradient_as_bucket_view='no': expected True"),
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


def test_checkpoints_are_written_in_another_thread(tmp_path):
    trainer = pl.Trainer(
        accelerator="cpu", strategy=TurboStrategy(checkpoint_io=AsyncCheckpointIO()), max_epochs=1, logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Net()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(8, 1, 6, 6), torch.arange(8) % 3), batch_size=4))
    (path,) = tmp_path.rglob("*.ckpt")
    written = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("strategy", [TurboStrategy, TurboDDPStrategy])
def test_a_trainer_can_be_pickled_and_copied(strategy):
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy(prefetch_batches=3), logger=False)
    trainer.strategy._borrowed.callback(lambda: None)  # as in a run
    for twin in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert type(twin.strategy) is strategy
        assert twin.strategy.prefetch_batches == 3


def test_a_copy_made_in_a_run_gives_nothing_back():
    class Copies(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            copy.deepcopy(trainer.strategy)._borrowed.close()
            pickle.loads(pickle.dumps(trainer.strategy))._borrowed.close()

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            assert index == 0 or all(p.grad is None for p in module.parameters())  # the first step is watched

    fit(Net(), "turbo", callbacks=[Copies()])


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
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy="turbo", max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}), Save()],
        )  # fmt: skip
        trainer.fit(model, PrefetchLoader(data, batch_size=8), **resume)
        return model, trainer.global_step

    whole, steps = train()
    rest, at = train(ckpt_path=path, **unpickling(False))
    assert (at, rest.losses) == (steps, whole.losses[-len(rest.losses) :])
    assert all(torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True))


class Counting(DataLoader):
    """Shuffles by an epoch of its own, which its state holds: at an epoch's end, that of the next one."""

    def __init__(self):
        super().__init__(TensorDataset(torch.randn(24, 1, 6, 6), torch.arange(24) % 3), batch_size=8)
        self.epoch, self.given = 0, 0

    def __iter__(self):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).split(8)
        first, self.given = self.given, 0
        for rows in order[first:]:
            self.given += 1
            if self.given + first == len(order):
                self.epoch, self.given = self.epoch + 1, 0
            yield self.dataset[rows]

    def state_dict(self):
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state):
        self.epoch, self.given = state["epoch"], state["given"]


@pytest.mark.parametrize("strategy", ["auto", "turbo"])
def test_a_loader_with_a_state_of_its_own_gets_it_back_at_the_end_of_an_epoch(strategy, tmp_path):
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "step.ckpt")

    def train(**resume):
        torch.manual_seed(0)
        model = Net()
        pl.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[] if resume else [Save()],
        ).fit(model, Counting(), **resume)  # fmt: skip
        return model

    whole, rest = train(), train(ckpt_path=tmp_path / "step.ckpt", **unpickling(False))
    assert rest.losses == whole.losses[3:]


SPAWN = Path(__file__).with_name("spawn_worker.py")


@pytest.mark.slow
@pytest.mark.distributed
def test_two_spawned_ranks_give_what_ddp_spawn_gives(tmp_path):
    run_ranks(SPAWN, tmp_path, ranks=1)
    stock, turbo = (torch.load(tmp_path / name, weights_only=True) for name in ("stock", "turbo"))
    assert turbo["metrics"] == stock["metrics"]
    assert all(torch.equal(turbo["module"][name], value) for name, value in stock["module"].items())
    assert stock["metrics"]["steps"] == 6
    assert not torch.equal(stock["module"]["net.weight"], stock["start"])


@pytest.mark.distributed
def test_two_ranks_under_turbo_ddp_equal_ddp(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    run_ranks(WORKER, folder)
    runs = {path.name: torch.load(path, weights_only=True) for path in folder.iterdir()}
    assert [runs.pop(f"formats.{rank}") for rank in (0, 1)] == [[True, True]] * 2  # as rank 0 measured
    for rank in (0, 1):
        straight, in_epoch, at_its_end = runs.pop(f"orders.{rank}")
        assert len(straight) == 24
        assert in_epoch == straight[8:], rank
        assert at_its_end == straight[12:], rank
    for rank in (0, 1):  # from a checkpoint of a whole epoch
        again, workers = runs.pop(f"again.{rank}"), runs[f"workers.{rank}"]
        assert again["seen"] == workers["seen"][6:]
        assert all(torch.equal(again["module"][name], value) for name, value in workers["module"].items())
    for name in {file.split(".")[0] for file in runs}:
        a, b = runs[f"{name}.0"], runs[f"{name}.1"]
        assert all(torch.equal(x, y) for x, y in zip(a["module"].values(), b["module"].values(), strict=True)), name
        epochs = [sorted(i for batch in (*a["seen"][k : k + 6], *b["seen"][k : k + 6]) for i in batch) for k in (0, 6)]
        assert epochs == [list(range(48))] * 2, name  # each sample once an epoch over the ranks
    for turbo, stock, tolerance in (
        ("turbo", "stock", 0.0), ("static-1", "stock-1", 0.0), ("turbo-O2", "stock-O2", 0.0),
        ("sized", "stock", 0.0), ("compiled", "stock", 1e-6), ("fp16", "stock", 5e-4),
    ):  # fmt: skip
        assert runs[f"{turbo}.0"]["steps"] == runs[f"{stock}.0"]["steps"]
        for name, ours in runs[f"{turbo}.0"]["module"].items():
            torch.testing.assert_close(ours, runs[f"{stock}.0"]["module"][name], rtol=0, atol=tolerance, msg=turbo)
    stock = runs["stock.0"]["module"]
    assert any(not torch.equal(ours, stock[name]) for name, ours in runs["fp16.0"]["module"].items())  # rounded
    for name, static, view in (
        ("stock", False, False), ("turbo", False, True), ("static-1", True, False), ("fp16", False, True),
    ):  # fmt: skip
        assert runs[f"{name}.0"]["ddp"] == {"static_graph": static, "gradient_as_bucket_view": view}, name
