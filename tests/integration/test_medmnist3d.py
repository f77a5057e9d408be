"""examples/medmnist3d: training, resuming, each trick off, invalid input, pretrained weights, the ablation."""

import json
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from monai.networks.nets import resnet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import lightning_turbo
from examples.medmnist3d import ablation
from examples.medmnist3d.__main__ import main
from examples.medmnist3d.chart import summary
from examples.medmnist3d.data import FastVolumes, Volumes
from examples.medmnist3d.model import VolumeClassifier
from examples.medmnist3d.tricks import TRICKS
from examples.medmnist3d.weights import load_weights
from lightning_turbo.errors import MissingExtraError

CONFIG = Path(lightning_turbo.__file__).parent.parent / "examples" / "medmnist3d" / "config.yaml"
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Precision bf16-mixed is not supported by the model summary",
        "ignore:Checkpoint directory .* exists and is not empty",
    ),
    pytest.mark.timeout(300),
]


def bright_cubes(path, side):
    """A file like MedMNIST's: positive volumes have a bright cube in the middle."""
    rng, arrays = np.random.default_rng(0), {}
    for part, count in (("train", 20), ("val", 10), ("test", 6)):
        labels = (np.arange(count) % 5 < 2).astype(np.uint8)
        images = rng.integers(0, 120, (count, side, side, side))
        middle = slice(side // 4, side - side // 4)
        images[labels == 1, middle, middle, middle] += 100
        arrays |= {f"{part}_images": images.astype(np.uint8), f"{part}_labels": labels[:, None]}
    np.savez_compressed(path, **arrays)
    return path


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Volumes with 12 voxels per side."""
    return bright_cubes(tmp_path_factory.mktemp("medmnist") / "cubes.npz", 12)


@pytest.fixture
def command(monkeypatch, volumes, tmp_path):
    """Runs the example's command line with the smallest network."""

    def run(subcommand, *words, out="whole"):
        (tmp_path / out).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / out)
        monkeypatch.setattr(
            sys, "argv",
            ["medmnist3d", subcommand, "--config", str(CONFIG), "--data", str(volumes), "--data.batch_size", "4",
             "--model.depth", "10", "--model.widen", "0.125", "--trainer.accelerator", "cpu",
             "--trainer.enable_progress_bar", "false",
             "--trainer.enable_model_summary", "false", *words],
        )  # fmt: skip
        return main()

    return run


# float32, because the bfloat16 gradient of torch's 3D convolutions on the CPU reads uninitialized memory.
SETTINGS = ("--trainer.plugins", "null", "--model.epochs_up", "1", "--trainer.max_epochs")


def test_the_example_trains_and_logs(command, tmp_path):
    done = command("fit", *SETTINGS, "1", "--trainer.log_every_n_steps", "1")
    assert done.model.loss.pos_weight == pytest.approx(1.5)
    assert {path.name for path in Path("runs/medmnist3d/checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    events = EventAccumulator(str(tmp_path / "whole" / done.trainer.log_dir)).Reload()
    assert {"train/loss", "train/loss_step", "val/loss", "val/auc", "val/accuracy"} <= set(events.Tags()["scalars"])
    assert len(events.Images("val/slices")) == 1


@pytest.mark.slow
def test_the_example_learns_and_a_resumed_run_equals_an_uninterrupted_one(command):
    whole = command("fit", *SETTINGS, "4")
    assert whole.trainer.callback_metrics["val/auc"] > 0.9
    command("fit", *SETTINGS, "2", out="parts")
    resumed = command("fit", *SETTINGS, "4", "--ckpt_path", "last", out="parts")
    assert resumed.trainer.current_epoch == 4
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    tested = command("test", "--ckpt_path", "runs/medmnist3d/checkpoints/best.ckpt", out="parts")
    assert tested.trainer.callback_metrics["test/auc"] >= 0.5


OWN = {
    "ApexAMP", "DropBiasBeforeNorm", "ExactAccumulation", "FastVolumes", "GradToNone", "MemoryFormat",
    "SliceImages",
}  # fmt: skip


def test_every_trick_is_in_the_configuration_and_can_be_switched_off(monkeypatch):
    def parse(*words):
        small = ["--model.depth", "10", "--model.widen", "0.125", "--trainer.accelerator", "cpu"]
        done = LightningCLI(
            VolumeClassifier, Volumes, subclass_mode_data=True, run=False, seed_everything_default=False,
            args=["--config", str(CONFIG), *small, *words],
        )  # fmt: skip
        parts = (*done.trainer.callbacks, done.trainer.precision_plugin, done.datamodule)
        return done, {type(part).__name__ for part in parts} & OWN

    monkeypatch.setattr(sys, "argv", ["medmnist3d"])
    on, parts = parse()
    assert parts == OWN
    assert (on.trainer.gradient_clip_val, on.trainer.accumulate_grad_batches) == (1.0, 2)
    assert (on.model.schedule, on.model.pos_weight, on.datamodule.packed) == ("cyclic", None, True)
    off, parts = parse(
        "--trainer.plugins", "null", "--trainer.callbacks", "[]", "--trainer.gradient_clip_val", "null",
        "--trainer.accumulate_grad_batches", "1", "--model.schedule", "null", "--model.pos_weight", "1.0",
        "--data", "examples.medmnist3d.data.Volumes", "--data.packed", "false", "--trainer.logger", "false",
    )  # fmt: skip
    assert parts == set()
    assert (off.trainer.gradient_clip_val, off.trainer.accumulate_grad_batches) == (None, 1)
    assert isinstance(off.model.configure_optimizers(), torch.optim.AdamW)
    # The file marks each trick; O1 and O2 are one line.
    assert sum("# *" in line for line in CONFIG.read_text().splitlines()) >= len(TRICKS) - 1


@pytest.mark.parametrize("kind", [Volumes, FastVolumes])
def test_packed_and_unpacked_data_give_the_same_batches(volumes, kind):
    loaders = []
    for packed in (True, False):
        data = kind(str(volumes), batch_size=8, packed=packed)
        data.setup("fit")
        loaders.append(list(data.train_dataloader()))
    for (x, y), (x2, y2) in zip(*loaders, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    images, labels = data.on_after_batch_transfer(loaders[0][0], 0)
    assert (images.dtype, images.shape[1:], labels.dtype) == (torch.float32, (1, 12, 12, 12), torch.int64)
    assert images.min() >= -1
    assert images.max() <= 1


@pytest.mark.parametrize(("name", "spoil", "positive", "message"), [
    ("train_images", None, None, r"expected the arrays 'train_images' and 'train_labels'.*Rename the arrays"),
    ("train_images", lambda x: x[..., :3], None, r"expected train_images of shape .*got \(20, 12, 12, 3\)"),
    ("train_labels", lambda y: np.repeat(y, 2, 1), None, r"expected .* train_labels of shape .*got .* and \(20, 2\)"),
    ("train_labels", lambda y: y[:-1], None, "expected arrays of equal length"),
    ("train_labels", lambda y: 0 * y + 1, None, "expected training labels of two classes, got 20 equal labels"),
    ("train_labels", lambda y: y + 1, None, r"with the labels 0 and 1, got \[1, 2\]"),
    ("train_labels", lambda y: y + 1, 7, r"positive=7: expected a training label of .*, one of \[1, 2\]"),
    ("train_labels", lambda y: y + 1, 2, None),  # label 2 versus the rest
])  # fmt: skip
def test_a_file_with_the_wrong_format_is_refused(volumes, tmp_path, name, spoil, positive, message):
    with np.load(volumes) as file:
        arrays = dict(file)
    array = arrays.pop(name)
    np.savez(tmp_path / "spoiled.npz", **arrays, **({name: spoil(array)} if spoil else {}))
    data = Volumes(str(tmp_path / "spoiled.npz"), positive=positive)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        data.setup("fit")
        assert data.pos_weight == 1.5


def test_a_medmnist_dataset_is_loaded_by_name(volumes, tmp_path, monkeypatch):
    def install(download):
        info = {"vesselmnist3d": {"python_class": "VesselMNIST3D"}, "pathmnist": {"python_class": "PathMNIST"}}
        root = types.SimpleNamespace(DEFAULT_ROOT=str(tmp_path))
        module = types.SimpleNamespace(INFO=info, info=root, VesselMNIST3D=download)
        monkeypatch.setitem(sys.modules, "medmnist", module)

    def offline(split, download):
        raise RuntimeError("Something went wrong when downloading!")

    def online(split, download):
        (tmp_path / "vesselmnist3d.npz").write_bytes(volumes.read_bytes())

    monkeypatch.setitem(sys.modules, "medmnist", None)
    with pytest.raises(MissingExtraError, match=r"needs the package medmnist, which is not installed.*pip install"):
        Volumes("vesselmnist3d").prepare_data()
    install(offline)
    with pytest.raises(ValueError, match=r"could not download it .*put it at .*vesselmnist3d\.npz"):
        Volumes("vesselmnist3d").prepare_data()
    with pytest.raises(
        ValueError,
        match=r"expected 'mni152', an .npz file, or a 3D dataset of medmnist, got 'pathmnist'.*vesselmnist3d",
    ):
        Volumes("pathmnist").prepare_data()
    install(online)
    data = Volumes("vesselmnist3d")
    data.prepare_data()
    data.setup("fit")
    assert len(data.parts["train"]) == 20


def small_net(widen=0.125):
    return resnet.resnet10(spatial_dims=3, n_input_channels=1, num_classes=1, widen_factor=widen)


def test_pretrained_weights_load_with_a_report(tmp_path):
    torch.manual_seed(1)
    donor, net = small_net(), small_net()
    state = {f"module.{name}": value for name, value in donor.state_dict().items() if not name.startswith("fc.")}
    state["module.conv_seg.0.weight"] = torch.zeros(2)
    state["module.bn1.weight"] = torch.zeros(5)
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "resnet_10.pth")
    before = net.fc.weight.clone()
    report = load_weights(net, tmp_path / "resnet_10.pth")
    assert report.missing == ("fc.weight", "fc.bias")
    assert report.unexpected == ("conv_seg.0.weight",)
    assert report.differing == ("bn1.weight (5,) for (8,)",)
    assert len(report.matched) == len(donor.state_dict()) - 3
    assert torch.equal(net.layer4[0].conv1.weight, donor.layer4[0].conv1.weight)
    assert torch.equal(net.fc.weight, before)
    assert "2 missing: fc.weight, fc.bias" in str(report)
    model = VolumeClassifier(depth=10, widen=0.125)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "own.ckpt")  # a checkpoint of the example
    other = VolumeClassifier(depth=10, widen=0.125, weights=str(tmp_path / "own.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(model.net.parameters(), other.net.parameters(), strict=True))
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "strange.pth")
    with pytest.raises(ValueError, match=r"match nothing in ResNet: the file has weight, bias, the network has"):
        load_weights(net, tmp_path / "strange.pth")


def test_the_ablation_measures_and_plots(volumes, tmp_path, capsys):
    words = ["--quick", "--data", str(volumes), "--batch-size", "8", "--device", "cpu", "--repeats", "2", "--epochs"]
    out = tmp_path / "ablation"
    assert ablation.main([*words, "1", "--only", "all", "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert list(results["variants"]) == ["plain", "all"]
    assert [run["seed"] for run in results["variants"]["all"]["runs"]] == [0, 1]
    assert all(0 <= run["auc"] <= 1 and len(run["epoch_seconds"]) == 1 for run in results["variants"]["all"]["runs"])
    assert (out / "ablation.png").stat().st_size > 10_000
    (plain, everything) = summary(results)
    assert plain["ratios"] == [1.0, 1.0]
    assert len(everything["ratios"]) == 2
    assert "s/epoch" in capsys.readouterr().err
