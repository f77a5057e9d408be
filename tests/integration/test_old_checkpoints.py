"""Checkpoints of plain apex, of Lightning 1.x and of Lightning 2's own AMP go on under ApexAMP, and the reverse."""

import copy
import subprocess
import sys
import types
from collections import OrderedDict

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_turbo import AmpCheckpointIO, ApexAMP
from lightning_turbo.amp.checkpoints import CheckpointError, convert_checkpoint, to_torch_adam
from lightning_turbo.errors import TurboWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `LightningModule.optimizer_zero_grad`"),
    # Lightning says that the loaders' state is not part of a checkpoint in mid-epoch.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]

APEX_STATE = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17}}
TORCH_STATE = {
    "scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17,
}  # fmt: skip


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network()
        self.at_start = {}

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_start(self):
        optimizer = self.trainer.optimizers[0]
        plugin = self.trainer.precision_plugin
        scaler = plugin.state_dict()
        self.at_start = {
            "epoch": self.trainer.current_epoch,
            "step": self.trainer.global_step,
            "weights": {k: v.clone() for k, v in self.state_dict().items()},
            "momentum": [optimizer.state[p]["momentum_buffer"].clone() for g in optimizer.param_groups
                         for p in g["params"]] if optimizer.state else [],
            "scaler": {k: v for k, v in scaler.items() if k.startswith("loss_scaler")} or dict(scaler),
        }  # fmt: skip


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)


def trainer(*plugins, epochs=3, **kwargs):
    return Trainer(
        accelerator="cpu", plugins=list(plugins), max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **kwargs,
    )  # fmt: skip


def plugin(level="O1"):
    return ApexAMP(level, dtype=torch.float16)


def mixed():
    """Lightning's 16-mixed, which refuses a CPU only because its default scaler is CUDA's."""
    scaler = torch.amp.GradScaler("cpu")
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of one epoch under ApexAMP("O1")."""
    path = tmp_path_factory.mktemp("trained") / "o1.ckpt"
    run = trainer(plugin(), epochs=1)
    run.fit(Net(), loader())
    run.save_checkpoint(path)
    return path


def rewritten(trained, path, drop=("ApexAMP",), **changes):
    """A copy of the checkpoint as another version would have written it."""
    checkpoint = torch.load(trained, weights_only=True)
    for key in drop:
        del checkpoint[key]
    torch.save({**checkpoint, **changes}, path)
    return path


FOREIGN = {
    "MixedPrecision": TORCH_STATE,
    "MixedPrecisionPlugin": TORCH_STATE,
    "NativeMixedPrecisionPlugin": TORCH_STATE,
    "native_amp_scaling_state": TORCH_STATE,
    "ApexMixedPrecisionPlugin": APEX_STATE,
    "amp_scaling_state": APEX_STATE,
}


@pytest.mark.parametrize("key", FOREIGN)
def test_scaler_state_of_every_version_is_read_with_the_checkpoint_io(key, trained, tmp_path):
    version = "1.9.5" if key == "amp_scaling_state" else "2.0.0"
    path = rewritten(trained, tmp_path / "old.ckpt", **{key: FOREIGN[key], "pytorch-lightning_version": version})
    net = Net()
    trainer(plugin(), AmpCheckpointIO()).fit(net, loader(), ckpt_path=path)
    assert net.at_start["scaler"] == APEX_STATE


@pytest.mark.parametrize("key", [key for key in FOREIGN if key != "amp_scaling_state"])
def test_scaler_state_of_every_version_but_one_is_read_without_it(key, trained, tmp_path):
    path = rewritten(trained, tmp_path / "old.ckpt", **{key: FOREIGN[key]})
    net = Net()
    trainer(plugin()).fit(net, loader(), ckpt_path=path)
    assert net.at_start["scaler"] == APEX_STATE


@pytest.mark.filterwarnings("ignore:This checkpoint contains apex AMP data")
def test_a_state_that_lightning_dropped_is_said_to_be_missing(trained, tmp_path):
    path = rewritten(
        trained, tmp_path / "old.ckpt", amp_scaling_state=APEX_STATE, **{"pytorch-lightning_version": "1.9.5"}
    )
    with pytest.warns(TurboWarning, match=r"under any of .*amp_scaling_state.*not restored.*AmpCheckpointIO\(\)"):
        trainer(plugin()).fit(Net(), loader(), ckpt_path=path)


def test_where_nothing_matched_it_is_said_once_and_only_where_it_matters(trained, tmp_path):
    path = rewritten(trained, tmp_path / "old.ckpt")
    with pytest.warns(TurboWarning, match="under any of .*amp_scaling_state.*not restored") as caught:
        trainer(plugin(), AmpCheckpointIO()).fit(Net(), loader(), ckpt_path=path)
    assert sum(issubclass(w.category, TurboWarning) for w in caught) == 1
    trainer(AmpCheckpointIO()).fit(Net(), loader(), ckpt_path=path)  # no scaler here: warnings are errors


def test_the_checkpoint_io_wraps_another_and_refuses_what_is_none(tmp_path):
    calls = []

    class Recording(AmpCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            calls.append("save")
            super().save_checkpoint(checkpoint, path, storage_options)

        def remove_checkpoint(self, path):
            calls.append("remove")
            super().remove_checkpoint(path)

        def teardown(self):
            calls.append("teardown")
            super().teardown()

    outer = AmpCheckpointIO(Recording())
    outer.save_checkpoint({"amp": APEX_STATE, "x": 1}, tmp_path / "a")
    assert outer.load_checkpoint(tmp_path / "a") == {"ApexAMP": APEX_STATE, "x": 1}
    outer.remove_checkpoint(tmp_path / "a")
    outer.teardown()
    assert calls == ["save", "remove", "teardown"]
    assert not (tmp_path / "a").exists()
    with pytest.raises(TypeError, match=r"checkpoint_io='disk' is a str: expected a CheckpointIO.*Leave it out"):
        AmpCheckpointIO("disk")


def plain_apex_file(path, wrapped=False, half=False, **extra):
    """What a plain apex script saves, after two steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).pow(2).mean().backward()
        optimizer.step()
    weights = OrderedDict((("module." if wrapped else "") + k, v) for k, v in model.state_dict().items())
    if half:
        weights = OrderedDict((k, v.half()) for k, v in weights.items())
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "amp": OrderedDict(APEX_STATE), **extra}, path)
    return model, optimizer


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_converted_apex_file_goes_on_in_lightning(level, wrapped, tmp_path):
    model, optimizer = plain_apex_file(tmp_path / "old.pt", wrapped, epoch=2, global_step=40)
    before = (tmp_path / "old.pt").read_bytes()
    new = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix="model.")
    assert (tmp_path / "old.pt").read_bytes() == before
    assert torch.load(new, weights_only=True)["ApexAMP"] == APEX_STATE
    net = Net()
    run = trainer(plugin(level))
    run.fit(net, loader(), ckpt_path=new)
    start = net.at_start
    assert (start["epoch"], start["step"], start["scaler"]) == (2, 40, APEX_STATE)
    for name, value in model.state_dict().items():
        assert torch.equal(start["weights"][f"model.{name}"], value), name
    for ours, param in zip(start["momentum"], model.parameters(), strict=True):
        assert torch.equal(ours, optimizer.state[param]["momentum_buffer"])
    assert not torch.equal(net.model[0].weight, model[0].weight)  # it trained on
    assert run.global_step == 42  # one epoch of two steps was left


def test_half_weights_are_widened_and_schedulers_kept(tmp_path):
    scheduler = {"last_epoch": 3}
    plain_apex_file(tmp_path / "old.pt", half=True, lr_scheduler=scheduler)
    new = torch.load(convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt"), weights_only=True)
    assert {v.dtype for v in new["state_dict"].values()} == {torch.float32}
    assert new["lr_schedulers"] == [scheduler]


class Versioned(nn.Linear):
    """Reads its weights by the version of the module that wrote them, as torchvision's MNASNet."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        assert local_metadata.get("version") == 2, local_metadata
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize("place", ["", "model.", "a.model."])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["plain", "lightning"])
def test_the_versions_of_modules_go_along(kind, wrapped, place, tmp_path):
    def around(module, names):
        return module if not names else nn.ModuleDict({names[0]: around(module, names[1:])})

    model = nn.Sequential(OrderedDict(first=nn.BatchNorm1d(2), second=Versioned(2, 2)))
    part = {"module": model} if wrapped else None
    new = around(model, place.split(".")[:-1])
    if kind == "plain":
        weights = (model if part is None else nn.ModuleDict(part)).state_dict()
        torch.save({"model": weights, "optimizer": {}, "amp": APEX_STATE}, tmp_path / "old.pt")
    else:
        torch.save(
            {"state_dict": new.state_dict(), "epoch": 1, "global_step": 2, "amp_scaling_state": APEX_STATE,
             "pytorch-lightning_version": "1.9.5"}, tmp_path / "old.pt",
        )  # fmt: skip
    path = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix=place)
    new.load_state_dict(torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("source", ["O1", "O2"])
def test_a_checkpoint_of_apexamp_goes_on_under_16_mixed(source, tmp_path):
    run, first = trainer(plugin(source), epochs=1), Net()
    run.fit(first, loader())
    run.save_checkpoint(tmp_path / "ours.ckpt")
    new = convert_checkpoint(tmp_path / "ours.ckpt", tmp_path / "mixed.ckpt", to="mixed", growth_interval=500)
    saved = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    net = Net()
    trainer(mixed()).fit(net, loader(), ckpt_path=new)
    scaler = saved["ApexAMP"]["loss_scaler0"]
    assert net.at_start["scaler"] == {
        "scale": scaler["loss_scale"], "_growth_tracker": scaler["unskipped"], "growth_interval": 500,
        "growth_factor": 2.0, "backoff_factor": 0.5,
    }  # fmt: skip
    for name, value in saved["state_dict"].items():
        assert torch.equal(net.at_start["weights"][name], value), name
    assert net.at_start["step"] == 2


def test_a_16_mixed_checkpoint_goes_on_and_there_and_back_changes_nothing(tmp_path):
    run = trainer(mixed(), epochs=1)
    run.fit(Net(), loader())
    run.save_checkpoint(tmp_path / "mixed.ckpt")
    there = convert_checkpoint(tmp_path / "mixed.ckpt", tmp_path / "ours.ckpt")
    back = convert_checkpoint(there, tmp_path / "back.ckpt", to="mixed")
    saved, again = (torch.load(p, weights_only=True) for p in (tmp_path / "mixed.ckpt", back))
    assert saved["MixedPrecision"] == again["MixedPrecision"]
    assert saved.keys() == again.keys()
    net = Net()
    trainer(plugin()).fit(net, loader(), ckpt_path=there)
    assert net.at_start["scaler"]["loss_scaler0"]["loss_scale"] == saved["MixedPrecision"]["scale"]


@pytest.mark.parametrize("other", ["O0", "O1", "O3"])
def test_a_run_changes_its_level(other, tmp_path):
    run, first = trainer(plugin("O2"), epochs=1), Net()
    run.fit(first, loader())
    run.save_checkpoint(tmp_path / "o2.ckpt")
    net = Net()
    trainer(plugin(other)).fit(net, loader(), ckpt_path=tmp_path / "o2.ckpt")
    for name, value in first.state_dict().items():
        expected = value if other != "O3" else value.half().float()
        assert torch.equal(net.at_start["weights"][name], expected)


def test_train_at_O2_and_evaluate_at_O0(tmp_path):
    class Evaluating(Net):
        def validation_step(self, batch, batch_idx):
            assert self.model[0].weight.dtype is torch.float32
            self.log("out", self.model(batch[0]).sum())

    run, first = trainer(plugin("O2"), epochs=1), Net()
    run.fit(first, loader())
    run.save_checkpoint(tmp_path / "o2.ckpt")
    result = trainer(ApexAMP("O0")).validate(Evaluating(), loader(), ckpt_path=tmp_path / "o2.ckpt", verbose=False)
    assert result[0]["out"] == pytest.approx(first.model(torch.ones(4, 4)).sum().item(), rel=1e-6)


class Hparams(dict):
    """Stands for the objects that Lightning 1.x put into its checkpoints."""


def test_a_lightning_1_file_with_objects_needs_trust_and_loses_only_them(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Hparams", Hparams)
    old = rewritten(
        trained, tmp_path / "old.ckpt", amp_scaling_state=APEX_STATE, hyper_parameters=Hparams(lr=0.1, made=object),
        callbacks={Net: {"best": 1}}, **{"pytorch-lightning_version": "1.5.10"},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"holds objects.*trust=True .*--trust.*runs the code"):
        convert_checkpoint(old, tmp_path / "new.ckpt")
    assert not (tmp_path / "new.ckpt").exists()
    with pytest.warns(TurboWarning, match=r"Left out.*callbacks.Net, hyper_parameters.made"):
        convert_checkpoint(old, tmp_path / "new.ckpt", trust=True)
    new = torch.load(tmp_path / "new.ckpt", weights_only=True)
    assert new["hyper_parameters"] == {"lr": 0.1}
    assert new["ApexAMP"] == APEX_STATE
    assert "amp_scaling_state" not in new


def test_what_cannot_be_converted_is_refused_with_its_name(trained, tmp_path):
    new = tmp_path / "new.ckpt"

    def refused(content, match, **kwargs):
        torch.save(content, tmp_path / "old.pt")
        with pytest.raises(CheckpointError, match=match):
            convert_checkpoint(tmp_path / "old.pt", new, **kwargs)
        assert not new.exists()

    refused({"model": {}, "amp": APEX_STATE}, r"lacks 'optimizer'; it has \['amp', 'model'\]. Expected \{")
    refused({"amp": APEX_STATE}, "lacks 'model', 'optimizer'")
    refused({"weights": 1}, "lacks 'model', 'optimizer'; it has")
    counted = {"model": {}, "optimizer": {}, "amp": APEX_STATE}
    refused({**counted, "epoch": "last"}, "'epoch' in .*old.pt' is 'last': expected a whole number. Correct it")
    refused({**counted, "step": [3]}, r"'step' in .*old.pt' is \[3\]: expected a whole number")
    refused({**counted, "iteration": torch.zeros(2)}, r"'iteration' in .* is tensor\(\[0., 0.\]\): expected")
    refused({"model": 3, "optimizer": {}, "amp": APEX_STATE}, "'model' in .* is a int: expected what")
    refused({"model": {}, "optimizer": {}, "amp": {"foo": 1}}, "lacks the state of a loss scaler; looked for ApexAMP,")
    refused([1, 2], r"holds a list: expected a dict")
    refused({"pytorch-lightning_version": "2.0.0", "epoch": 1}, "lacks 'state_dict', 'global_step'")
    whole = trained.read_bytes()
    torch.save(counted, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)  # as torch before 1.6 did
    legacy = (tmp_path / "legacy.pt").read_bytes()
    cut_short = [legacy[:length] for length in range(0, len(legacy) - 8, 7)]
    for broken in (whole[: len(whole) // 2], b"not a checkpoint at all", whole[:40], *cut_short):
        (tmp_path / "broken.ckpt").write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"cannot be read as a checkpoint.*copy it again"):
            convert_checkpoint(tmp_path / "broken.ckpt", new)
        assert not new.exists()


def test_nothing_is_overwritten(trained, tmp_path):
    taken = tmp_path / "taken.ckpt"
    taken.write_text("mine")
    with pytest.raises(FileExistsError, match=r"taken.ckpt' exists: expected a path that is free"):
        convert_checkpoint(trained, taken)
    assert taken.read_text() == "mine"
    before = trained.read_bytes()
    with pytest.raises(FileExistsError):
        convert_checkpoint(trained, trained)
    assert trained.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="absent' does not exist: expected an old checkpoint"):
        convert_checkpoint(tmp_path / "absent", tmp_path / "new")
    with pytest.raises(FileNotFoundError, match=r"folder .* does not exist. Make it"):
        convert_checkpoint(trained, tmp_path / "absent" / "new")
    with pytest.raises(ValueError, match=r"to='native' is unknown: expected 'apex' .* or 'mixed'"):
        convert_checkpoint(trained, tmp_path / "new", to="native")
    with pytest.raises(ValueError, match="growth_interval=0: expected an int of 1 or more"):
        convert_checkpoint(trained, tmp_path / "new", growth_interval=0)


@pytest.mark.parametrize("to", ["apex", "mixed"])
@pytest.mark.parametrize("amp", [{}, {"amp": None}, {"amp": {}}], ids=["absent", "None", "empty"])
def test_a_plain_file_without_scaler_state_is_converted_without(amp, to, tmp_path):
    plain_apex_file(tmp_path / "full.pt", wrapped=True, epoch=2)
    content = torch.load(tmp_path / "full.pt", weights_only=True)
    del content["amp"]
    torch.save({**content, **amp}, tmp_path / "old.pt")
    with pytest.warns(TurboWarning) as caught:
        new = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", prefix="model.", to=to)
    assert [
        "old.pt' holds no state of a loss scaler: a dynamic scale starts from the beginning" in str(w.message)
        for w in caught
    ] == [True]
    assert not {"ApexAMP", "MixedPrecision", "amp"} & torch.load(new, weights_only=True).keys()
    net = Net()
    trainer(ApexAMP("O0")).fit(net, loader(), ckpt_path=new)
    assert net.at_start["epoch"] == 2


def test_what_lightning_has_no_place_for_is_named_in_one_warning(tmp_path):
    plain_apex_file(
        tmp_path / "old.pt", epoch="2", step=None, ema_state_dict=None, best_prec1=torch.tensor(12.0),
        state_dict_ema=network().state_dict(), lr_scheduler=None, scheduler={"last_epoch": 3, "f": object},
        **{"master params": [torch.ones(2)]},
    )  # fmt: skip
    with pytest.warns(TurboWarning) as caught:
        new = convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", trust=True)
    (message,) = (str(warning.message) for warning in caught)
    assert "new.ckpt': best_prec1, lr_schedulers[0].f, master params, state_dict_ema. Lightning has no" in message
    new = torch.load(new, weights_only=True)
    assert (new["epoch"], new["global_step"], new["lr_schedulers"]) == (2, 0, [{"last_epoch": 3}])


def adam_after(steps, weight_decay):
    """A network and torch's Adam after some steps, and the same state as apex's FusedAdam wrote it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay, fused=True)
    for _ in range(steps):
        adam_step(model, optimizer)
    group = {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
    state = {i: {k: optimizer.state[p][k].clone() for k in ("exp_avg", "exp_avg_sq")}
             for i, p in enumerate(model.parameters())}  # fmt: skip
    group |= {"bias_correction": True, "step": steps, "params": list(state)}
    return model, optimizer, {"state": state, "param_groups": [group]}


def adam_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 4)).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_of_fusedadam_goes_on_in_adamw_bit_for_bit(fused):
    first, optimizer, apex = adam_after(3, 0.1)
    before = copy.deepcopy(apex)
    second = network()
    second.load_state_dict(first.state_dict())
    other = torch.optim.AdamW(second.parameters(), fused=fused)
    other.load_state_dict(to_torch_adam(apex))
    assert apex["state"].keys() == before["state"].keys()
    assert all(apex["state"][i].keys() == before["state"][i].keys() for i in before["state"]), "what is given stays"
    assert apex["param_groups"] == before["param_groups"]
    for _ in range(2):
        adam_step(first, optimizer)
        adam_step(second, other)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for ours, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(ours["step"], theirs["step"])
        assert ours["step"].dtype is theirs["step"].dtype


def test_other_states_are_left_as_they_are():
    _, optimizer, apex = adam_after(2, 0.0)
    native = optimizer.state_dict()
    assert to_torch_adam(native) == native
    lamb = {**apex, "param_groups": [{**apex["param_groups"][0], "grad_averaging": True}]}
    assert to_torch_adam(lamb) == lamb
    own = {**apex, "state": {0: {"exp_avg_sq": torch.ones(1), "step": 9}, 2: {}}}  # 1 had no gradient
    assert to_torch_adam(own)["state"] == own["state"]
    for odd in (None, [1], {"G": apex}, {"state": {}}):
        assert to_torch_adam(odd) is odd


def test_what_fp16_optimizer_wrote_around_a_state_is_taken_off(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    masters = [[weight.detach() for weight in model.parameters()]]
    apex = {"overflow": False, "optimizer_state_dict": optimizer.state_dict(), "fp32_from_fp16": masters}
    torch.save({"model": model.state_dict(), "optimizer": apex, "amp": APEX_STATE}, tmp_path / "old.pt")
    new = torch.load(convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt"), weights_only=True)
    second = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    second.load_state_dict(new["optimizer_states"][0])
    for ours, theirs in zip(optimizer.state.values(), second.state.values(), strict=True):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])


def test_objects_of_a_package_that_is_not_installed(tmp_path, monkeypatch):
    module = types.ModuleType("gone_with_apex")
    module.Scaler = type("Scaler", (), {"__module__": "gone_with_apex"})
    monkeypatch.setitem(sys.modules, "gone_with_apex", module)
    torch.save({"model": network().state_dict(), "optimizer": {}, "amp": module.Scaler()}, tmp_path / "old.pt")
    monkeypatch.delitem(sys.modules, "gone_with_apex")
    with pytest.raises(CheckpointError, match="objects of 'gone_with_apex', which is not installed here"):
        convert_checkpoint(tmp_path / "old.pt", tmp_path / "new.ckpt", trust=True)


class AdamNet(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0, fused=True)

    def on_train_start(self):
        state = self.trainer.optimizers[0].state.values()
        self.at_start = {
            "steps": {float(each["step"]) for each in state},
            "moments": [each["exp_avg"] for each in state],
        }


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("source", ["converted", "lightning"])
def test_a_run_with_fusedadam_goes_on_in_a_trainer(level, source, trained, tmp_path):
    model, _, apex = adam_after(3, 0.0)
    old, plugins = tmp_path / "old.pt", [plugin(level)]
    if source == "converted":
        torch.save({"model": model.state_dict(), "optimizer": apex, "amp": APEX_STATE, "epoch": 1}, old)
        old = convert_checkpoint(old, tmp_path / "new.ckpt", prefix="model.")
    else:
        rewritten(trained, old, optimizer_states=[apex], amp_scaling_state=APEX_STATE,
                  **{"pytorch-lightning_version": "1.9.5"})  # fmt: skip
        plugins.append(AmpCheckpointIO())
    net = AdamNet()
    trainer(*plugins, epochs=2).fit(net, loader(), ckpt_path=old)
    assert net.at_start["steps"] == {3.0}
    for ours, theirs in zip(net.at_start["moments"], apex["state"].values(), strict=True):
        assert ours.shape == theirs["exp_avg"].shape


def test_several_scalers_become_one_with_a_warning(trained, tmp_path):
    old = rewritten(trained, tmp_path / "old.ckpt", ApexAMP={**APEX_STATE, "loss_scaler1": APEX_STATE["loss_scaler0"]},
                    drop=())  # fmt: skip
    with pytest.warns(TurboWarning, match=r"one loss scaler; left out: \['loss_scaler1'\]"):
        convert_checkpoint(old, tmp_path / "new.ckpt", to="mixed")


def test_the_command(tmp_path):
    plain_apex_file(tmp_path / "old.pt")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "lightning_turbo", "convert", *map(str, arguments)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    done = run(tmp_path / "old.pt", tmp_path / "new.ckpt", "--prefix", "model.")
    assert (done.returncode, done.stderr) == (0, "")
    assert "new.ckpt" in done.stdout
    again = run(tmp_path / "old.pt", tmp_path / "new.ckpt")
    assert again.returncode == 2
    assert "exists: expected a path that is free" in again.stderr
    (tmp_path / "broken").write_bytes(b"x")
    broken = run(tmp_path / "broken", tmp_path / "n")
    assert broken.returncode == 2
    assert "cannot be read as a checkpoint" in broken.stderr
    assert "Traceback" not in broken.stderr
