"""A YAML file for LightningCLI can name every public class that stands in a Trainer, with its arguments."""

import inspect

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

import lightning_turbo

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*isinstance.treespec, LeafSpec.* is deprecated",
)

# Section of the file, class, its arguments there, and what the object has to show for it.
TABLE = [
    ("callbacks", "GradToNone", {"parameters": "all"}, {"parameters": "all"}),
    ("callbacks", "ExactAccumulation", {"weight": "builtins.len"}, {"weight": len}),
    (
        "callbacks",
        "EffectiveBatchSize",
        {"target": 64, "lr_rule": "sqrt", "warmup_steps": 5, "base_batch_size": 8, "batch_size": 4},
        {"target": 64, "lr_rule": "sqrt", "warmup_steps": 5, "base_batch_size": 8, "batch_size": 4},
    ),
    (
        "callbacks",
        "DropBiasBeforeNorm",
        {"network": "net", "use_example_input": False},
        {"network": "net", "use_example_input": False},
    ),
    (
        "callbacks",
        "MemoryFormat",
        {"memory_format": "channels_last", "rounds": 2},
        {"memory_format": "channels_last", "rounds": 2},
    ),
    ("callbacks", "PrefetchNextEpoch", {}, {}),
    ("callbacks", "Doctor", {}, {}),
    ("plugins", "ApexAMP", {"opt_level": "O2", "loss_scale": 128.0}, {"opt_level": "O2"}),
    ("plugins", "AmpCheckpointIO", {}, {}),
    ("plugins", "AtomicCheckpointIO", {}, {}),
    ("strategy", "TurboStrategy", {}, {}),
    ("strategy", "TurboDDPStrategy", {}, {}),
]
DATA = {"PrefetchDataModule", "DALIDataModule"}
NOT_IN_A_TRAINER = {"DALILoader", "DevicePrefetcher", "Normalize", "PackedDataset", "PrefetchLoader"}


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(lightning_turbo.PrefetchDataModule):
    def __init__(self, batch_size: int = 4, **kwargs):
        super().__init__(**kwargs)
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=self.batch_size)


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train"])


TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def load(data_class=None, **sections):
    with open("given.yaml", "w") as file:
        yaml.safe_dump(sections, file)
    return LightningCLI(Net, data_class, run=False, args=["--config", "given.yaml"], seed_everything_default=False)


def held(trainer, section):
    if section == "callbacks":
        return trainer.callbacks
    return [trainer.precision_plugin, trainer.strategy.checkpoint_io, trainer.strategy]


@pytest.mark.parametrize(("section", "name", "arguments", "shown"), TABLE, ids=[name for _, name, _, _ in TABLE])
def test_a_file_names_the_class_and_its_arguments(section, name, arguments, shown):
    entry = {"class_path": f"lightning_turbo.{name}", "init_args": arguments}
    value = entry if section == "strategy" else [entry]
    trainer = load(trainer={**TRAINER, section: value}).trainer
    (found,) = [thing for thing in held(trainer, section) if type(thing) is getattr(lightning_turbo, name)]
    for attribute, wanted in shown.items():
        assert getattr(found, attribute) == wanted


def test_no_public_class_is_left_out():
    public = {name for name in lightning_turbo.__all__ if inspect.isclass(getattr(lightning_turbo, name))}
    assert public == {name for _, name, _, _ in TABLE} | DATA | NOT_IN_A_TRAINER


def test_a_file_can_name_two_at_once_and_fit():
    cli = load(
        Data,
        trainer={
            **TRAINER,
            "callbacks": [
                {"class_path": "lightning_turbo.EffectiveBatchSize", "init_args": {"target": 8}},
                {"class_path": "lightning_turbo.GradToNone"},
            ],
        },
        data={"batch_size": 2, "prefetch_batches": 3, "prefetch_threads": 2, "device_prefetch": False},
    )
    assert cli.datamodule.train_dataloader().prefetch_batches == 3
    assert cli.datamodule.train_dataloader().prefetch_threads == 2
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.accumulate_grad_batches == 4


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("GradToNone", {"parameters": "some"}, "parameters"),
        ("EffectiveBatchSize", {"target": "many"}, "target"),
        ("MemoryFormat", {"memory_format": "nhwc"}, "memory_format"),
    ],
)
def test_a_wrong_value_in_a_file_is_named(name, arguments, message, capsys):
    with pytest.raises(SystemExit):
        load(trainer={**TRAINER, "callbacks": [{"class_path": f"lightning_turbo.{name}", "init_args": arguments}]})
    assert message in capsys.readouterr().err
