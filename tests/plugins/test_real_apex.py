"""RealApexAMP with a fake apex, and with NVIDIA's apex if it is installed."""

import contextlib
import sys
import types

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_turbo import ApexAMP, RealApexAMP
from lightning_turbo.errors import MissingExtraError
from tests.trainers import quiet_trainer


class FakeAmp(types.ModuleType):
    """Stands for apex.amp and records its calls."""

    def __init__(self):
        super().__init__("apex.amp")
        self.calls = []
        self.scale = 65536.0

    def initialize(self, model, optimizers, **kwargs):
        self.calls.append(("initialize", type(model).__name__, len(optimizers), kwargs))
        return model, optimizers

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizers, loss_id=0):
        yield loss * 8.0
        self.calls.append(("scale_loss", loss_id))
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            for p in self.master_params(optimizer):
                p.grad.div_(8.0)

    def master_params(self, optimizer):
        return (p for group in optimizer.param_groups for p in group["params"])

    def state_dict(self):
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": 3}}

    def load_state_dict(self, state):
        self.scale = state["loss_scaler0"]["loss_scale"]


@pytest.fixture
def fake(monkeypatch):
    apex, amp = types.ModuleType("apex"), FakeAmp()
    apex.amp = amp
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    return amp


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(plugin, ckpt_path=None, epochs=1, make=Net, **kwargs):
    net = make()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
    trainer = quiet_trainer(plugins=[] if plugin is None else [plugin], max_epochs=epochs, **kwargs)
    trainer.fit(net, data, ckpt_path=ckpt_path)
    return net, trainer


@pytest.mark.parametrize(("file", "said"), [
    (None, "apex"),
    ("", "No module named 'apex.amp'"),  # NVIDIA's after tag 25.05, PyPI's project
    ("import an_extension_that_is_absent", "an_extension_that_is_absent"),
])  # fmt: skip
def test_an_error_explains_a_missing_apex(file, said, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    if file is None:
        monkeypatch.setitem(sys.modules, "apex", None)  # makes Python treat the package as missing
    else:
        (tmp_path / "apex").mkdir()
        (tmp_path / "apex" / "__init__.py").write_text(file)
        monkeypatch.syspath_prepend(tmp_path)
    try:
        advice = "tag 25.05.*unrelated project.*use ApexAMP"
        with pytest.raises(MissingExtraError, match=f"needs apex.amp.*({said}).*{advice}"):
            RealApexAMP("O1")
    finally:
        sys.modules.pop("apex", None)


def test_a_trainer_calls_apex(fake):
    net, trainer = fit(RealApexAMP("O2", loss_scale=128.0), gradient_clip_val=1e9, accumulate_grad_batches=1)
    plain, _ = fit(None)
    assert torch.equal(net.model.weight, plain.model.weight)  # scaled by 8 and unscaled again, exactly
    assert [call[0] for call in fake.calls] == ["initialize", "scale_loss", "scale_loss"]
    name, *given, kwargs = fake.calls[0]
    assert [name, *given] == ["initialize", "Net", 1]
    assert kwargs == {"opt_level": "O2", "verbosity": 0, "loss_scale": 128.0}
    assert trainer.precision_plugin.precision == "16-true"
    assert trainer.precision_plugin.loss_scale == 65536.0


def test_the_scaler_state_is_exchanged_between_both_plugins(fake, tmp_path):
    _, trainer = fit(RealApexAMP("O1"))
    trainer.save_checkpoint(tmp_path / "apex.ckpt")
    saved = torch.load(tmp_path / "apex.ckpt", weights_only=True)
    assert saved["RealApexAMP"] == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}}
    saved["RealApexAMP"]["loss_scaler0"]["loss_scale"] = 512.0
    torch.save(saved, tmp_path / "changed.ckpt")
    fit(RealApexAMP("O1"), tmp_path / "changed.ckpt", 2)
    assert fake.scale == 512.0
    native = ApexAMP("O1", dtype=torch.float16)
    fit(native, tmp_path / "changed.ckpt", 2)
    assert native.loss_scale == 512.0
    # The other direction
    fit(native, tmp_path / "changed.ckpt", 2)[1].save_checkpoint(tmp_path / "native.ckpt")
    assert "RealApexAMP" not in torch.load(tmp_path / "native.ckpt", weights_only=True)
    fake.scale = 1.0
    fit(RealApexAMP("O1"), tmp_path / "native.ckpt", 3)
    assert fake.scale == 512.0
    # A checkpoint of Lightning 1.x with apex, or of Lightning's AMP.
    del saved["RealApexAMP"]
    saved["ApexMixedPrecisionPlugin"] = {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 0}}
    torch.save(saved, tmp_path / "old.ckpt")
    fit(RealApexAMP("O1"), tmp_path / "old.ckpt", 2)
    assert fake.scale == 256.0


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_levels_that_cast_weights_are_refused_with_ddp(fake, level):
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(MisconfigurationException, match=f"expected 'O0' or 'O1', got '{level}': Lightning"):
        RealApexAMP(level).connect(wrapped, [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)], [])
    assert fake.calls == []


def test_apex_is_not_called_without_training(fake):
    plugin, network = RealApexAMP("O2"), nn.Linear(1, 1)
    assert plugin.connect(network, [], []) == (network, [], [])
    plugin.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    assert plugin.state_dict() == {}
    assert (fake.calls, fake.scale) == ([], 65536.0)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_makes_no_apex_step(fake):
    class Never(Net):
        def training_step(self, batch, batch_idx):
            return None

    net, _ = fit(RealApexAMP("O1"), make=Never)
    assert torch.equal(net.model.weight, Net().model.weight)
    assert [call[0] for call in fake.calls] == ["initialize"]


@pytest.mark.apex
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])  # O1 patches torch until the end of the process
def test_the_real_apex_trains_under_the_trainer(level):
    net, trainer = fit(RealApexAMP(level, loss_scale=128.0))
    assert trainer.global_step == 2
    assert all(torch.isfinite(p).all() for p in net.parameters())
