"""LightningCLI can create every public class that a Trainer takes from a YAML file, with its arguments."""

import inspect
from datetime import timedelta
from operator import attrgetter

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

import lightning_turbo
from lightning_turbo.doctor.timeline import Plan
from tests.dali_samples import make_photos
from tests.trainers import FLAGS
from tests.versions import KNOWS_WEIGHTS_ONLY

pytestmark = pytest.mark.filterwarnings(
    # Arguments without a type annotation, such as those of torch's DataLoader.
    "ignore:\\s*Instantiating a subclass spec given as value for a type that accepts any value",
)

ASYNC = {"class_path": "lightning.pytorch.plugins.io.AsyncCheckpointIO"}
PARTS = {
    "device_prefetch": False, "release_gradients": False, "exact_resume": False,
    "compile": {"what": "blocks", "mode": "max-autotune"},
    **({"lean": True} if KNOWS_WEIGHTS_ONLY else {}),
}  # fmt: skip
# Arguments of a strategy that Lightning has as well, and the attributes that the strategy must have.
GIVEN = {
    "checkpoint_io": ASYNC,
    "precision_plugin": {"class_path": "lightning_turbo.ApexAMP", "init_args": {"opt_level": "O2"}},
}
GOT = {"checkpoint_io.__class__": AsyncCheckpointIO, "precision_plugin.opt_level": "O2", **PARTS}
DOCTOR = {"minutes": 2.0, "json": "seen.json"}

SIZES = {"target": 64, "batch_size": 4}
FORMAT = {"memory_format": "contiguous"}
LOADING = {"prefetch_batches": 3, "threads": 2}
AMP = {"opt_level": "O2", "loss_scale": 128.0}

# Section of the file, class, its arguments, and the attributes that the object must have.
AUGMENTATION = {
    "class_path": "lightning_turbo.data.augment.BatchAugmentation",
    "init_args": {
        "transforms": [{"class_path": "lightning_turbo.data.augment.RandomFlip", "init_args": {"p": 0.25}}],
        "seed": 3, "image": "image", "mask": "mask",
    },
}  # fmt: skip
TABLE = [
    ("callbacks", "GradToNone", {}, {}),
    ("callbacks", "ExactAccumulation", {"weight": "builtins.len"}, {"weight": len}),
    ("callbacks", "EffectiveBatchSize", SIZES, SIZES),
    ("callbacks", "DropBiasBeforeNorm", {"network": "net"}, {"network": "net"}),
    ("callbacks", "MemoryFormat", FORMAT, FORMAT),
    ("callbacks", "ExactResume", {}, {}),
    ("callbacks", "FusedOptimizers", {}, {}),
    ("callbacks", "Preemption", {"signals": ["SIGUSR1"], "time_limit": 60.0}, {}),
    ("callbacks", "Prefetch", LOADING, LOADING),
    ("callbacks", "AugmentBatches", {"augmentation": AUGMENTATION, "training_only": False}, {
        "training_only": False, "augmentation.seed": 3, "augmentation.masks": ("mask",),
    }),
    ("callbacks", "Doctor", {"warmup": 1, "timed": 2, "watched": 5, **DOCTOR}, {"plan": Plan(1, 2, 5), **DOCTOR}),
    ("plugins", "ApexAMP", {"dtype": "float16", **AMP}, {"half_dtype": torch.float16, **AMP}),
    ("plugins", "AtomicCheckpointIO", {}, {}),
    ("strategy", "TurboStrategy", {"device": "cpu", **GIVEN, **PARTS}, {"root_device": torch.device("cpu"), **GOT}),
    (
        "strategy",
        "TurboDDPStrategy",
        {
            "gradient_as_bucket_view": False, "static_graph": True, "preemption": False,
            "find_unused_parameters": True, "process_group_backend": "gloo", "timeout": "0:05:00",
            **GIVEN, **PARTS,
        },
        {
            "_ddp_kwargs": {
                "gradient_as_bucket_view": False, "static_graph": True, "find_unused_parameters": True,
            },
            "process_group_backend": "gloo", "_timeout": timedelta(minutes=5),
            **GOT,
        },
    ),
]  # fmt: skip
DATA = {
    "PrefetchDataModule",
    "DALIDataModule",
    "PrefetchLoader",
    "PackedDataset",
    "PatchDataset",
    "Normalize",
    "DALILoader",
}
# They take an existing loader or dataset, are passed to a plugin, or need NVIDIA's apex.
IN_CODE = {
    "DevicePrefetcher", "LengthBatchSampler", "SeededSampler", "WeightedSampler", "ApexGradScaler", "RealApexAMP",
}  # fmt: skip


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


class Given(LightningDataModule):
    """A DataModule whose loader the file specifies."""

    def __init__(self, loader: DataLoader | lightning_turbo.DALILoader):
        super().__init__()
        self.loader = loader


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train"])


def load(data_class=None, **sections):
    with open("given.yaml", "w") as file:
        yaml.safe_dump(sections, file)
    return LightningCLI(Net, data_class, run=False, args=["--config", "given.yaml"], seed_everything_default=False)


def held(trainer, section):
    if section == "callbacks":
        return trainer.callbacks
    return [trainer.precision_plugin, trainer.strategy.checkpoint_io, trainer.strategy]


def named(name, **arguments):
    return {"class_path": f"lightning_turbo.{name}", "init_args": arguments}


def agrees(found, shown):
    for attribute, wanted in shown.items():
        got = attrgetter(attribute)(found)
        if isinstance(wanted, dict):  # these items, and others
            got = {name: got[name] for name in wanted}
        assert got == wanted, attribute


@pytest.mark.parametrize(("section", "name", "arguments", "shown"), TABLE, ids=[name for _, name, _, _ in TABLE])
def test_yaml_instantiates_the_class_with_its_arguments(section, name, arguments, shown):
    entry = named(name, **arguments)
    value = entry if section == "strategy" else [entry]
    trainer = load(trainer={**FLAGS, section: value}).trainer
    (found,) = [thing for thing in held(trainer, section) if type(thing) is getattr(lightning_turbo, name)]
    agrees(found, shown)


@pytest.mark.parametrize(("text", "dtype"), [
    ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16), ("torch.float16", torch.float16),
])  # fmt: skip
def test_yaml_gives_dtypes_as_strings(text, dtype):
    settings = named("ApexAMP", opt_level="O2", dtype=text, cast_model_outputs=text, keep_fp32_modules=["net"])
    found = load(trainer={**FLAGS, "plugins": [settings]}).trainer.precision_plugin
    agrees(found, {"half_dtype": dtype, "_casts.properties.cast_model_outputs": dtype})


def test_every_public_class_has_a_yaml_example():
    public = {name for name in lightning_turbo.__all__ if inspect.isclass(getattr(lightning_turbo, name))}
    assert public == {name for _, name, _, _ in TABLE} | DATA | IN_CODE


@pytest.mark.skipif(
    not isinstance(DataLoader.__init__.__annotations__["dataset"], str),
    reason="jsonargparse does not find the arguments of a class for Dataset[T], as torch 2.6 annotates it",
)
def test_yaml_instantiates_a_loader_and_its_dataset():
    np.savez("rows.npz", x=np.zeros((7, 4), np.float32), y=np.arange(7))
    dataset = named("PackedDataset", source="rows.npz", keys=["x"], transform="builtins.len")
    settings = {"batch_size": 2, "drop_last": True, "prefetch_batches": 3, "threads": 2}
    file = {"loader": named("PrefetchLoader", dataset=dataset, **settings)}
    loader = load(Given, trainer=FLAGS, data=file).datamodule.loader
    assert type(loader) is lightning_turbo.PrefetchLoader
    agrees(loader, {**settings, "dataset.transform": len})
    assert list(loader.dataset.arrays) == ["x"]


def test_yaml_gives_the_arguments_of_a_prefetching_datamodule():
    normalize = named("Normalize", mean=[0.5], std=[0.25], dtype="torch.float16", scale=1.0, keys=["image"])
    settings = {"prefetch_batches": 3, "threads": 2}
    file = {"batch_size": 2, **settings, "device_prefetch": False, "device_transform": normalize, "sample_seeds": 1}
    datamodule = load(Data, trainer=FLAGS, data=file).datamodule
    assert datamodule.train_dataloader().batch_size == 2
    agrees(datamodule._prefetch, {
        **settings,
        "device_prefetch": False, "sample_seeds": 1, "device_transform.factor": [4.0],
        "device_transform.offset": [-2.0], "device_transform.dtype": torch.float16,
        "device_transform.keys": ("image",),
    })  # fmt: skip


def test_yaml_gives_the_arguments_of_dali():
    pytest.importorskip("nvidia.dali")
    make_photos("photos", per_class=1)
    images, options = {"size": 8, "index": True}, {"num_threads": 1, "prefetch": 3, "seed": 5}
    built = {"num_threads": 1, "_settings.prefetch": 3, "seed": 5}
    folders = {"train": "photos", "val": "photos", "test": "photos", "predict": "photos"}
    file = named("DALIDataModule", **folders, batch_size=2, drop_last=True, images=images, **options)
    datamodule = load(trainer=FLAGS, data=file).datamodule
    assert list(datamodule.loaders) == list(folders)
    for name, loader in datamodule.loaders.items():
        agrees(
            loader,
            {
                "_settings.batch_size": 2,
                "_settings.drop_last": name == "train",
                "num_threads": 1,
                "seed": 5,
                "_settings.prefetch": 3,
                "pipeline.size": 8,
            },
        )

    recipe = named("data.dali.ImageFolder", root="photos", train=True, **images)
    settings = {"batch_size": 2, "drop_last": True, **options}
    file = {"loader": named("DALILoader", pipeline=recipe, device="cpu", rank=1, world_size=2, **settings)}
    loader = load(Given, trainer=FLAGS, data=file).datamodule.loader
    agrees(loader, {
        "_settings.drop_last": True, **built, "device": torch.device("cpu"), "_shard": (1, 2),
        "pipeline.mirrored": 0.5,
    })  # fmt: skip
