"""The turbo strategies: the same results as Lightning's own, with every part on, off, and given back."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import AmpCheckpointIO, ApexAMP, TurboDDPStrategy, TurboStrategy
from tests.ranks import run_ranks

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
    {"precision": "bf16-true"},
], ids=str)  # fmt: skip
def test_turbo_computes_what_the_default_computes(settings):
    ends = []
    for strategy in ("auto", "turbo", TurboStrategy(release_gradients=False, cudnn_benchmark=None)):
        model = Net() if settings.get("precision") != "64-true" else Net().double()
        if settings.get("precision") == "64-true":
            model.example_input_array = model.example_input_array.double()
        fit(model, strategy, **settings)
        ends.append((model.losses, [p.detach().clone() for p in model.parameters()]))
    for losses, parameters in ends[1:]:
        assert losses == ends[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, ends[0][1], strict=True))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_turbo_works_with_every_level(level):
    ends = []
    for strategy in ("auto", "turbo"):
        model = Net()
        fit(model, strategy, plugins=[ApexAMP(level)])
        ends.append(model.losses)
    assert ends[0] == ends[1]


def test_turbo_takes_a_compiled_model():
    plain, compiled = Net(), Net(compiled=True)
    fit(plain, "turbo")
    fit(compiled, "turbo")
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize("choice", ["channels_last", "measure"])
def test_the_memory_format_is_set_or_measured(choice):
    class Look(pl.Callback):
        def on_train_start(self, trainer, module):
            self.last = module.net[0].weight.is_contiguous(memory_format=torch.channels_last)

    look, model, reference = Look(), Net(), Net()
    model.net[0] = nn.Conv2d(1, 4, 3)
    reference.net[0].load_state_dict(model.net[0].state_dict())
    fit(model, TurboStrategy(memory_format=choice), callbacks=[look])
    fit(reference, "auto")
    assert look.last or choice == "measure"
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
    monkeypatch.setattr("lightning_turbo.strategies.parts.rank_zero_info", said.append)
    fit(Net(), "turbo")
    assert said == ["turbo: device_prefetch, cudnn_benchmark have no meaning on cpu."]


def test_checkpoints_of_old_scalers_are_read_by_both():
    assert isinstance(TurboStrategy().checkpoint_io, AmpCheckpointIO)
    assert isinstance(TurboDDPStrategy().checkpoint_io, AmpCheckpointIO)


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: TurboStrategy(memory_format="last"), ValueError, "memory_format='last'; accepted are None, 'measure'"),
    (lambda: TurboStrategy(device_prefetch="yes"), TypeError, "device_prefetch='yes' is no bool"),
    (lambda: TurboStrategy(prefetch_batches=0), ValueError, "prefetch_batches=0; accepted is a whole number"),
    (lambda: TurboStrategy(cudnn_benchmark=1), TypeError, "cudnn_benchmark=1 is no bool"),
    (lambda: TurboStrategy(matmul_precision="low"), ValueError, "matmul_precision='low'; accepted are"),
    (lambda: TurboDDPStrategy(grad_compression="int8"), ValueError, "grad_compression='int8'; accepted are None"),
    (lambda: TurboDDPStrategy(static_graph=1), TypeError, "static_graph=1 is no bool"),
    (lambda: TurboDDPStrategy(grad_compression="bf16", ddp_comm_hook=print), ValueError, "were both given"),
])  # fmt: skip
def test_bad_settings_are_refused_in_words(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_several_devices_are_refused_by_turbo():
    with pytest.raises(
        MisconfigurationException, match=r"given 2 devices; accepted is one\. Take strategy='turbo_ddp'"
    ):
        pl.Trainer(accelerator="cpu", devices=2, strategy="turbo", logger=False)


@pytest.mark.parametrize(("settings", "text"), [
    ({"static_graph": True}, "static_graph=True and accumulate_grad_batches=2; accepted is one"),
    ({"grad_compression": "bf16"}, "grad_compression='bf16' was asked for on cpu"),
])  # fmt: skip
def test_what_torch_cannot_do_is_refused_before_the_first_step(settings, text):
    strategy = TurboDDPStrategy(**settings)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(MisconfigurationException, match=text):
        strategy.setup(trainer)


@pytest.mark.distributed
def test_two_ranks_under_turbo_ddp_equal_ddp(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    run_ranks(WORKER, folder)
    runs = {path.name: torch.load(path, weights_only=True) for path in folder.iterdir()}
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
        ("fp16", "stock", 5e-4),
    ):  # fmt: skip
        for name, ours in runs[f"{turbo}.0"]["module"].items():
            torch.testing.assert_close(ours, runs[f"{stock}.0"]["module"][name], rtol=0, atol=tolerance, msg=turbo)
