"""Checkpoints of plain apex, of Lightning 1.x and of Lightning 2's own AMP continue under ApexAMP."""

import argparse
import copy
import warnings
from collections import OrderedDict

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_turbo import ApexAMP
from lightning_turbo.amp.convert import CheckpointError, convert_checkpoint, to_torch_adam
from lightning_turbo.cli import main
from lightning_turbo.errors import TurboWarning
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `LightningModule.optimizer_zero_grad`"),
    # Lightning warns that a checkpoint within an epoch has no state of the loaders.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]

APEX = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17}}
TORCH = {"scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17}
OLD = {"pytorch-lightning_version": "1.9.5"}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Net(LightningModule):
    """Records its state at the start of training."""

    def __init__(self, optimizer=torch.optim.SGD, **settings):
        super().__init__()
        self.model = network()
        self.make = lambda params: optimizer(params, lr=0.01, **(settings or {"momentum": 0.9}))

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return self.make(self.parameters())

    def on_train_start(self):
        self.place = self.trainer.current_epoch, self.trainer.global_step
        self.weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.states = copy.deepcopy([*self.trainer.optimizers[0].state.values()])
        scaler = self.trainer.precision_plugin.state_dict()
        self.scaler = {k: v for k, v in scaler.items() if k.startswith("loss_scaler")} or dict(scaler)


def fit(*plugins, epochs=3, ckpt_path=None, net=None, save=None):
    net = Net() if net is None else net
    trainer = quiet_trainer(plugins=list(plugins), max_epochs=epochs)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
    trainer.fit(net, loader, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return net


def plugin(level="O1"):
    return ApexAMP(level, dtype=torch.float16)


def load(path):
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of one epoch under ApexAMP("O1")."""
    path = tmp_path_factory.mktemp("trained") / "o1.ckpt"
    fit(plugin(), epochs=1, save=path)
    return path


def rewrite(trained, path, **changes):
    """Return a copy of the checkpoint in the format of another version."""
    checkpoint = load(trained)
    del checkpoint["ApexAMP"]
    torch.save({**checkpoint, **changes}, path)
    return path


@pytest.mark.parametrize(("key", "state"), [
    ("MixedPrecision", TORCH), ("native_amp_scaling_state", TORCH), ("ApexMixedPrecisionPlugin", APEX),
])  # fmt: skip
def test_the_scaler_state_of_other_plugins_is_loaded(key, state, trained, tmp_path):
    assert fit(plugin(), ckpt_path=rewrite(trained, tmp_path / "old.ckpt", **{key: state})).scaler == APEX


class Versioned(nn.Linear):
    """Loads its weights depending on the version of the module that saved them, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        assert local_metadata.get("version") == 2, local_metadata
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def plain_parts(**extra):
    """Return what a plain apex script saves after two steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).pow(2).mean().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": OrderedDict(APEX), **extra}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_converted_apex_checkpoint_resumes_in_lightning(level, tmp_path):
    parts = plain_parts(epoch=2, global_step=40, lr_scheduler={})
    torch.save(parts, tmp_path / "old.pt")
    before = (tmp_path / "old.pt").read_bytes()
    new = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix="model.")
    assert (tmp_path / "old.pt").read_bytes() == before
    net = fit(plugin(level), ckpt_path=new)
    assert (net.place, net.scaler) == ((2, 40), APEX)
    assert all(torch.equal(net.weights[name], value) for name, value in parts["model"].items())
    for ours, theirs in zip(net.states, parts["optimizer"]["state"].values(), strict=True):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])
    assert not torch.equal(net.model[0].weight, net.weights["0.weight"])
    assert net.trainer.global_step == 42  # one epoch of two steps remained


@pytest.mark.parametrize(
    ("place", "kind"), [("model.", "plain"), ("", "wrapped"), ("a.model.", "wrapped"), ("", "lightning")]
)
def test_half_weights_are_converted_to_float32_and_module_versions_are_kept(kind, place, tmp_path):
    new = model = nn.Sequential(OrderedDict(first=nn.BatchNorm1d(2), second=Versioned(2, 2)))
    for name in reversed(place.split(".")[:-1]):
        new = nn.ModuleDict({name: new})
    if kind == "lightning":
        parts = {"state_dict": new.state_dict(), "epoch": 1, "global_step": 2, "amp_scaling_state": APEX, **OLD}
    else:
        weights = (nn.ModuleDict({"module": model}) if kind == "wrapped" else model).half().state_dict()
        parts = {"model": weights, "optimizer": {}, "amp": APEX}
    torch.save(parts, tmp_path / "old.pt")
    weights = load(convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix=place))["state_dict"]
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}
    new.load_state_dict(weights)


class Hparams(dict):
    """Stands for the objects that Lightning 1.x saved in its checkpoints."""


def test_a_lightning_1_checkpoint_with_objects_needs_trust(trained, tmp_path, monkeypatch):
    old = rewrite(trained, tmp_path / "old.ckpt", amp_scaling_state=APEX, hyper_parameters=Hparams(lr=0.1), **OLD)
    with pytest.raises(CheckpointError, match=r"cannot be read.*Hparams.*trust=True .*--trust.*can run any code"):
        convert_checkpoint(old, tmp_path / "new.ckpt")
    assert not (tmp_path / "new.ckpt").exists()
    new = torch.load(convert_checkpoint(old, tmp_path / "new.ckpt", trust=True), weights_only=False)
    assert (new["hyper_parameters"], new["ApexAMP"]) == ({"lr": 0.1}, APEX)
    assert "amp_scaling_state" not in new


def test_a_plain_checkpoint_with_script_arguments_names_their_class(tmp_path):
    old, new = tmp_path / "old.pt", tmp_path / "new.ckpt"
    torch.save({**plain_parts(), "args": argparse.Namespace(lr=0.1)}, old)
    with pytest.raises(CheckpointError, match=r"checkpoint: it contains argparse\.Namespace\. .*trust=True"):
        convert_checkpoint(old, new, prefix="model.")
    with pytest.warns(TurboWarning, match="no entry for them: .*args"):
        convert_checkpoint(old, new, prefix="model.", trust=True)
    assert torch.load(new, weights_only=True)["state_dict"]


@pytest.mark.parametrize(("content", "match"), [
    ({"model": {}, "extra": 1}, r"model, extra: expected a checkpoint .*\{'model', 'optimizer', 'amp'\} as in apex's"),
    ({"model": 3, "optimizer": {}}, r"has model, optimizer: expected .* with what state_dict\(\) returned"),
    ({f"part{i}": torch.ones(1) for i in range(120)}, r"has part0, .*part7 and 112 more: expected a checkpoint"),
    ([1, 2], r"old.pt: expected a dict of states, got 'list'"),
    (b"not a checkpoint at all", r"cannot be read as a checkpoint.*Expected a full file"),
    (0.5, "cannot be read as a checkpoint"),
])  # fmt: skip
def test_a_checkpoint_that_cannot_be_converted_is_refused(content, match, trained, tmp_path):
    old, new = tmp_path / "old.pt", tmp_path / "new.ckpt"
    if isinstance(content, float):
        content = trained.read_bytes()[: int(content * trained.stat().st_size)]
    if isinstance(content, bytes):
        old.write_bytes(content)
    else:
        torch.save(content, old)
    with pytest.raises(CheckpointError, match=match):
        convert_checkpoint(old, new)
    assert not new.exists()


def test_conversion_overwrites_nothing_and_names_the_paths(trained, tmp_path):
    before = trained.read_bytes()
    with pytest.raises(FileExistsError, match=r"o1.ckpt' exists: expected a new path"):
        convert_checkpoint(trained, trained)
    assert trained.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="absent"):
        convert_checkpoint(tmp_path / "absent", tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="absent/new"):
        convert_checkpoint(trained, tmp_path / "absent" / "new")


@pytest.mark.parametrize("amp", [{}, {"amp": None}, {"amp": {}}], ids=["absent", "None", "empty"])
def test_a_checkpoint_without_scaler_state_is_converted(amp, tmp_path):
    parts = plain_parts(epoch=2, step=4, scheduler={})
    del parts["amp"]
    torch.save({**parts, **amp}, tmp_path / "old.pt")
    with pytest.warns(TurboWarning, match="has no loss scaler state: a dynamic scale restarts from its initial value"):
        new = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix="model.")
    assert not {"ApexAMP", "amp"} & load(new).keys()
    assert fit(ApexAMP("O0"), ckpt_path=new).place[0] == 2


def test_one_warning_names_the_missing_entries_of_a_checkpoint(tmp_path):
    more = {"best_prec1": torch.tensor(12.0), "state_dict_ema": {}, "master params": [torch.ones(2)]}
    parts = plain_parts(epoch="2", step=9, ema_state_dict=None, lr_scheduler=None, scheduler={"last_epoch": 3})
    torch.save({**parts, **more}, tmp_path / "old.pt")
    with pytest.warns(TurboWarning, match=r"has no entry for them: best_prec1, master params, state_dict_ema\.$"):
        new = load(convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix=""))
    assert (new["epoch"], new["global_step"], new["lr_schedulers"]) == (2, 9, [{"last_epoch": 3}])


@pytest.mark.parametrize(("name", "scaler", "style"), [
    ("amp", APEX, "{}_state_dict"), ("apex", {**APEX, "loss_scaler1": APEX["loss_scaler0"]}, "{}"),
    ("scaler", TORCH, "{}"),
])  # fmt: skip
def test_the_scaler_state_of_a_plain_script_is_found_under_any_name(name, scaler, style, tmp_path):
    parts = plain_parts()
    del parts["amp"]
    torch.save({style.format(key): value for key, value in (parts | {name: scaler}).items()}, tmp_path / "old.pt")
    new = load(convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix=""))  # warnings are errors
    assert new["ApexAMP"] == (APEX if scaler is TORCH else scaler)


def test_the_state_of_fp16_optimizer_is_not_mistaken_for_scaler_state(tmp_path):
    parts = plain_parts()
    around = {"loss_scaler": Hparams(), "optimizer_state_dict": parts["optimizer"], "fp32_from_fp16": []}
    torch.save({"model": parts["model"], "optimizer": around}, tmp_path / "old.pt")
    with pytest.warns(TurboWarning, match="has no loss scaler state"):
        new = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix="", trust=True)
    assert load(new)["optimizer_states"][0]["param_groups"] == parts["optimizer"]["param_groups"]


def test_a_warning_names_the_prefix_of_the_weights(tmp_path):
    network = nn.ModuleDict({"module": nn.Sequential(*(nn.Linear(1, 1) for _ in range(11)))})
    torch.save({"model": network.state_dict(), "optimizer": {}, "amp": APEX}, tmp_path / "old.pt")
    said = r"begin with 0, 1, 2, 3, 4, 5, 6, 7 and 3 more\. For .* pass prefix='model\.' \(--prefix model\.\)"
    with pytest.warns(TurboWarning, match=said):
        new = load(convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt"))
    assert all(name[0].isdigit() for name in new["state_dict"])
    with pytest.raises(ValueError, match=r"expected a name that ends with a dot, such as 'model.', got 'model'"):
        convert_checkpoint(tmp_path / "old.pt", tmp_path / "other.ckpt", prefix="model")


@pytest.mark.parametrize(("places", "messages"), [
    ({"epoch": 3}, ["global_step will start from 0.", "schedulers will start from 0. To set one"]),
    ({"epoch": 3, "step": 30}, ["schedulers will start from 0"]),
    ({"epoch": 3, "scheduler": {}}, ["global_step will start from 0"]),
    ({"step": 30}, ["schedulers will start from 0"]),
    ({}, []),
])  # fmt: skip
def test_a_warning_names_the_counters_that_start_from_0(places, messages, tmp_path):
    torch.save(plain_parts(**places), tmp_path / "old.pt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix="model.")
    for warning, message in zip(caught, messages, strict=True):
        assert message in str(warning.message)


class Stepping(Net):
    """Resumes its scheduler as the warning says."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def on_train_start(self):
        self.rates = []
        self.lr_schedulers().last_epoch = self.current_epoch

    def on_train_epoch_start(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def test_a_scheduler_resumes_at_the_epoch_of_a_converted_checkpoint(tmp_path):
    parts = plain_parts(epoch=3, step=6)
    parts["optimizer"]["param_groups"][0]["lr"] = 1e-3
    torch.save(parts, tmp_path / "old.pt")
    with pytest.warns(TurboWarning, match="schedulers will start from 0"):
        new = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix="model.")
    assert fit(plugin(), epochs=6, ckpt_path=new, net=Stepping()).rates == pytest.approx([1e-3, 1e-4, 1e-4])


def adam_after(steps, weight_decay):
    """Return a network and torch's Adam after some steps, and the same state in the format of apex's FusedAdam."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay, fused=True)
    for _ in range(steps):
        adam_step(model, optimizer)
    group = {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
    moments = ("exp_avg", "exp_avg_sq")
    state = {i: {k: optimizer.state[p][k].clone() for k in moments} for i, p in enumerate(model.parameters())}
    group |= {"bias_correction": True, "step": steps, "params": list(state)}
    return model, optimizer, {"state": state, "param_groups": [group]}


def adam_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 4)).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_of_fusedadam_continues_in_adamw_bit_for_bit(fused):
    first, optimizer, apex = adam_after(3, 0.1)
    second = network()
    second.load_state_dict(first.state_dict())
    other = torch.optim.AdamW(second.parameters(), fused=fused)
    other.load_state_dict(to_torch_adam(apex))
    assert all(own.keys() == {"exp_avg", "exp_avg_sq"} for own in apex["state"].values()), "the argument was changed"
    for _ in range(2):
        adam_step(first, optimizer)
        adam_step(second, other)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    for ours, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(ours["step"], theirs["step"])
        assert ours["step"].dtype is theirs["step"].dtype


def test_the_states_of_other_optimizers_are_not_converted():
    _, optimizer, apex = adam_after(2, 0.0)
    native = optimizer.state_dict()
    assert to_torch_adam(native) == native
    lamb = {**apex, "param_groups": [{**apex["param_groups"][0], "grad_averaging": True}]}
    assert to_torch_adam(lamb) == lamb
    own = {**apex, "state": {0: {"exp_avg_sq": torch.ones(1), "step": 9}, 2: {}}}  # 1 had no gradient
    assert to_torch_adam(own)["state"] == own["state"]
    for odd in (None, [1], {"G": apex}, {"state": {}}):
        assert to_torch_adam(odd) is odd
    around = {"overflow": False, "optimizer_state_dict": native, "fp32_from_fp16": [[torch.ones(1)]]}
    assert to_torch_adam(around) == native  # the state of apex's FP16_Optimizer


@pytest.mark.parametrize(("level", "source"), [("O1", "plain"), ("O2", "lightning")])
def test_a_run_with_fusedadam_continues_in_a_trainer(level, source, trained, tmp_path):
    model, _, apex = adam_after(3, 0.0)
    old = tmp_path / "old.pt"
    if source == "plain":
        places = {"epoch": 1, "step": 3, "scheduler": {}}
        torch.save({"model": model.state_dict(), "optimizer": apex, "amp": APEX, **places}, old)
    else:
        rewrite(trained, old, optimizer_states=[apex], amp_scaling_state=APEX, **OLD)
    new = convert_checkpoint(old, tmp_path / "new.ckpt", prefix="model.")
    net = fit(plugin(level), epochs=2, ckpt_path=new, net=Net(torch.optim.AdamW, weight_decay=0.0, fused=True))
    assert net.scaler == APEX
    assert {float(each["step"]) for each in net.states} == {3.0}
    for ours, theirs in zip(net.states, apex["state"].values(), strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])


def test_the_convert_command(tmp_path, capsys):
    torch.save(plain_parts(), tmp_path / "old.pt")
    assert main(["convert", f"{tmp_path}/old.pt", f"{tmp_path}/new.ckpt", "--prefix", "model."]) == 0
    assert "new.ckpt" in capsys.readouterr().out
    assert main(["convert", f"{tmp_path}/old.pt", f"{tmp_path}/bare.ckpt"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("lightning-turbo: warning: The names of weights begin with 0, 2. For a network")
    assert said.err.count("\n") == 1, "the source line is not shown"
    assert main(["convert", f"{tmp_path}/old.pt", f"{tmp_path}/n", "--prefix", "model"]) == 2
    assert "prefix: expected a name that ends with a dot" in capsys.readouterr().err
    assert main(["convert", f"{tmp_path}/old.pt", f"{tmp_path}/new.ckpt"]) == 2
    assert "exists: expected a new path" in capsys.readouterr().err
    (tmp_path / "broken").write_bytes(b"x")
    assert main(["convert", f"{tmp_path}/broken", f"{tmp_path}/n"]) == 2
    assert "cannot be read as a checkpoint" in capsys.readouterr().err
