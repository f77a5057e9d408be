"""DALIDataModule and DALILoader under a real Trainer."""

import os
import signal
import warnings

import nvidia.dali.experimental.dynamic as dynamic
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from nvidia.dali import fn, pipeline_def, types

from lightning_turbo import DALIDataModule, DALILoader, _optional
from lightning_turbo.data.dali import DynamicPipeline, ImageFolder
from lightning_turbo.errors import MissingExtraError
from tests.dali_samples import make_photos
from tests.integration.recording import Save
from tests.trainers import quiet_trainer

SETTINGS = {"batch_size": 4, "num_threads": 1, "seed": 3, "images": {"size": 8, "index": True}}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), per_class=7)  # 21 images: batches of 4, 4, 4, 4, 4, 1


class Model(LightningModule):
    """Records its batches: (epoch, batch, numbers of the files, sum of the pixels)."""

    def __init__(self, inputs=3 * 8 * 8, reads_length=False):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, 3)
        self.reads_length = reads_length
        self.trained, self.validated, self.tested = [], [], []

    def _entry(self, batch, batch_idx):
        images, labels, *numbers = batch
        assert labels.shape == (len(images),)
        assert labels.dtype == torch.int64
        numbers = numbers[0] if numbers else labels
        return self.current_epoch, batch_idx, numbers.tolist(), float(images.double().sum())

    def training_step(self, batch, batch_idx):
        self.trained.append(self._entry(batch, batch_idx))
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)).float(), batch[1])

    def validation_step(self, batch, batch_idx):
        self.validated.append(self._entry(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.tested.append(self._entry(batch, batch_idx))

    def predict_step(self, batch, batch_idx):
        images, numbers = batch
        return self.layer(images.flatten(1)), numbers

    def configure_optimizers(self):
        if self.reads_length:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 0.01)


def data(photos, *, val=True, **kwargs):
    return DALIDataModule(photos, photos if val else None, **{**SETTINGS, **kwargs})


def fit(photos, module=None, ckpt_path=None, model=None, **kwargs):
    torch.manual_seed(0)
    model = model or Model()
    module = module or data(photos)
    runner = quiet_trainer(**{"max_epochs": 2, **kwargs})
    runner.fit(model, module, ckpt_path=ckpt_path)
    return model, runner, module


def numbers(entries, epoch=None):
    return [n for e, _, batch, _ in entries for n in batch if epoch in (None, e)]


@pytest.fixture(scope="module")
def whole(photos):
    """Three uninterrupted epochs."""
    with warnings.catch_warnings():  # a fixture is not covered by the marks above
        warnings.simplefilter("ignore")
        return fit(photos, max_epochs=3)[0]


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 6), (True, 5)])
def test_every_dali_epoch_is_complete_and_has_the_length_of_the_loader(photos, whole, drop_last, steps):
    module = data(photos, drop_last=drop_last)
    assert not module.loaders["train"].built
    model, runner, _ = fit(photos, module)
    assert not module.loaders["train"].built, "teardown releases what setup has built"
    often, _, _ = fit(photos, module, val_check_interval=2)
    assert often.trained == model.trained, "validation within an epoch does not affect training"
    assert runner.num_training_batches == steps
    assert runner.global_step == 2 * steps
    assert runner.num_val_batches == [6]
    for epoch in range(2):
        assert len(set(numbers(model.trained, epoch))) == (20 if drop_last else 21)
        # Validation used two batches before training, then all batches once per epoch, independent of training.
        assert sorted(numbers(model.validated[2:], epoch)) == list(range(21))
    assert numbers(model.trained, 0) != numbers(model.trained, 1)


def ctrl_c(trainer):
    os.kill(os.getpid(), signal.SIGINT)


def stops(trainer):
    trainer.should_stop = True


@pytest.mark.parametrize("how", [ctrl_c, stops])
def test_another_fit_with_the_same_dali_datamodule_after_an_interrupted_epoch(photos, whole, how):
    class Break(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                how(trainer)

    module, model = data(photos), Model()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fit(photos, module, model=model, callbacks=[Break()])
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert model.trained == whole.trained[:3]
    again, _, _ = fit(photos, module, max_epochs=3)
    assert again.trained == whole.trained


@pipeline_def
def written(files, shard_id, num_shards):
    encoded, labels = fn.readers.file(
        files=files, labels=list(range(len(files))), shard_id=shard_id, num_shards=num_shards, random_shuffle=True,
        initial_fill=8, pad_last_batch=True, name="photos",
    )  # fmt: skip
    image = fn.decoders.image_random_crop(encoded, output_type=types.RGB)
    image = fn.crop_mirror_normalize(
        fn.resize(image, size=(8, 8)), mirror=fn.random.coin_flip(), mean=[128.0], std=[64.0], dtype=types.FLOAT
    )
    return image, labels % 3, labels


def read(files, shard_id, num_shards, order_seed, shuffle=True):
    """The pipeline of ``written`` in dynamic mode."""
    return dynamic.readers.File(
        files=files, labels=list(range(len(files))), shard_id=shard_id, num_shards=num_shards, random_shuffle=shuffle,
        initial_fill=8, pad_last_batch=True, seed=order_seed, enable_checkpointing=True,
    )  # fmt: skip


def process(encoded, labels, rng):
    image = dynamic.decoders.image_random_crop(encoded, output_type=types.RGB, rng=rng, device="cpu")
    mirror = dynamic.random.coin_flip(rng=rng, batch_size=image.batch_size)
    image = dynamic.crop_mirror_normalize(
        dynamic.resize(image, size=(8, 8)), mirror=mirror, mean=[128.0], std=[64.0], dtype=dynamic.float32
    )
    return image, labels % 3, labels


def files_of(photos):
    return {"files": sorted(str(path) for path in photos.rglob("*.*"))}


def of(kind, photos):
    if kind == "folder":
        return data(photos)
    pipeline = written if kind == "written" else DynamicPipeline(read, process)
    return DALIDataModule(pipeline, batch_size=4, num_threads=1, seed=3, arguments=files_of(photos))


def test_dynamic_mode_trains_validates_tests_and_predicts_each_sample_once(photos):
    def in_order(encoded, labels):
        image = dynamic.resize(dynamic.decoders.image(encoded, output_type=types.RGB), size=(8, 8))
        return dynamic.cast(image, dtype=dynamic.float32), labels % 3, labels

    def to_predict(encoded, labels):
        return in_order(encoded, labels)[::2]

    def loader(function):
        settings = {"arguments": {**files_of(photos), "shuffle": False}, "num_threads": 1}
        return DALILoader(DynamicPipeline(read, function), 4, **settings)

    module = DALIDataModule(
        DynamicPipeline(read, process), loader(in_order), loader(in_order), loader(to_predict),
        batch_size=4, num_threads=1, seed=3, arguments=files_of(photos),
    )  # fmt: skip
    model, runner, _ = fit(photos, module, num_sanity_val_steps=0)
    for epoch in (0, 1):
        assert sorted(numbers(model.trained, epoch)) == numbers(model.validated, epoch) == list(range(21))
    runner.test(model, module, verbose=False)
    assert numbers(model.tested) == list(range(21))
    assert torch.cat([n for _, n in runner.predict(model, module)]).tolist() == list(range(21))


@pytest.mark.filterwarnings("ignore:.*validation_step. but have no .val_dataloader.*")
@pytest.mark.parametrize(("strategy", "kind", "limit", "batches", "hook"), [
    ("auto", "folder", 1.0, 1, "on_train_batch_end"), ("auto", "folder", 4, 8, "on_train_batch_end"),
    ("auto", "written", 1.0, 10, "on_train_batch_end"), ("auto", "written", 4, 8, "on_train_epoch_end"),
    ("auto", "dynamic", 1.0, 10, "on_train_batch_end"), ("turbo", "dynamic", 4, 8, "on_train_epoch_end"),
    ("turbo", "folder", 1.0, 12, "on_train_epoch_end"), ("turbo", "written", 1.0, 12, "on_train_batch_end"),
])  # fmt: skip
def test_a_resumed_dali_run_equals_an_uninterrupted_one(photos, tmp_path, strategy, kind, limit, batches, hook):
    path = tmp_path / "kept.ckpt"
    settings = {"max_epochs": 3, "limit_train_batches": limit, "strategy": strategy}
    model, _, _ = fit(photos, of(kind, photos), callbacks=[Save(path, batches, hook)], **settings)
    reads_length = Model(reads_length=kind == "folder")  # configure_optimizers asks for the length of the training
    resumed, _, _ = fit(photos, of(kind, photos), model=reads_length, ckpt_path=path, **settings)
    assert resumed.trained == model.trained[batches:]
    assert torch.equal(resumed.layer.weight, model.layer.weight)


def test_a_dali_loader_without_a_datamodule_resumes(photos, whole, tmp_path):
    path = tmp_path / "kept.ckpt"

    def run(ckpt_path=None, callbacks=()):
        torch.manual_seed(0)
        model = Model()
        loader = DALILoader(ImageFolder(photos, train=True, size=8, index=True), 4, num_threads=1, seed=3)
        plain = DALILoader(ImageFolder(photos, train=False, size=8, index=True), 4, num_threads=1)
        quiet_trainer(max_epochs=2, callbacks=list(callbacks)).fit(model, loader, plain, ckpt_path=ckpt_path)
        loader.close()
        plain.close()
        return model

    run(callbacks=[Save(path, 7)])
    assert run(path).trained == whole.trained[7:12]


def test_a_dali_datamodule_with_a_plain_dataloader_and_a_hook_of_a_subclass(photos, whole):
    images = [(torch.zeros(3, 8, 8), torch.tensor(n), n) for n in range(5)]
    plain = torch.utils.data.DataLoader(images, batch_size=2)

    class Mixed(DALIDataModule):
        def val_dataloader(self):
            return plain

    for module in (Mixed(photos, **SETTINGS), DALIDataModule(photos, plain, **SETTINGS)):
        model, _, _ = fit(photos, module)
        assert model.trained == whole.trained[:12]
        assert numbers(model.validated, 1) == list(range(5))


def test_a_dali_datamodule_accepts_every_kind_of_source(photos, tmp_path):
    few = make_photos(tmp_path, per_class=1)
    (few / "gravel" / "000.jpg").unlink()
    (few / "gravel").rmdir()  # the classes are those of training
    train = DALILoader(ImageFolder(photos, train=True, size=8, index=True), 7, num_threads=1, drop_last=True)
    test = ImageFolder(photos, train=False, size=8, index=True)
    module = DALIDataModule(train, str(few), test, photos, **SETTINGS)
    model, runner, _ = fit(photos, module, max_epochs=1, num_sanity_val_steps=0)
    assert (runner.num_training_batches, runner.num_val_batches) == (3, [1])
    assert numbers(model.validated) == [0, 1]
    runner.test(model, module, verbose=False)
    assert numbers(model.tested) == list(range(21))
    assert not any(loader.built for loader in module.loaders.values())
    predicted = runner.predict(model, module)
    assert torch.cat([n for _, n in predicted]).tolist() == list(range(21))
    assert module.loaders["predict"].pipeline.labels is None
    alone, model = DALIDataModule(test=few, classes=("brick", "grass", "gravel"), **SETTINGS), Model()
    quiet_trainer().test(model, alone, verbose=False)
    assert numbers(model.tested) == [0, 1]


def test_dali_sources_with_different_labels_are_refused(photos, tmp_path):
    (tmp_path / "asphalt").mkdir()
    make_photos(tmp_path, per_class=1)
    (tmp_path / "brick" / "000.jpg").rename(tmp_path / "asphalt" / "000.jpg")
    (tmp_path / "brick").rmdir()
    with pytest.raises(ValueError, match=r"classes: expected all subfolders .* without \['asphalt'\]"):
        DALIDataModule(photos, tmp_path, batch_size=4)
    other = ImageFolder(tmp_path, train=False)
    for sources in ({"train": photos, "val": other}, {"val": ImageFolder(photos, train=False), "test": other}):
        with pytest.raises(
            ValueError, match=r"(val|test): expected the classes .*, got \('asphalt', 'grass', 'gravel'\)"
        ):
            DALIDataModule(**sources, batch_size=4)


def test_dali_ranks_share_the_cores(photos, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    module = DALIDataModule(photos, photos, batch_size=4, images={"size": 8})
    module.trainer = quiet_trainer(devices=4, strategy="ddp")
    module.setup("fit")
    assert [module.loaders[name].num_threads for name in ("train", "val")] == [3, 3]
    module.teardown("fit")


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ({}, ValueError, "train, val, test, predict: expected at least one source"),
        ({"val": 3}, TypeError, "val: expected a folder, an ImageFolder"),
        ({"test": ["photos", "more"]}, TypeError, "test: expected a folder, .*got \\['photos', 'more'\\]"),
        ({"train": {"class_path": "Nothing"}}, TypeError, "in a config file, check class_path and init_args"),
        ({"train": written, "nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_wrong_arguments_are_refused(sources, error, message):
    with pytest.raises(error, match=message):
        DALIDataModule(**sources, batch_size=4)


def test_a_missing_dali_source_is_named(photos, monkeypatch):
    with pytest.raises(ValueError, match="trainer: expected a Trainer"):
        data(photos).setup("fit")
    monkeypatch.setattr(_optional, "installed_version", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"DALIDataModule needs .*\[dali\]"):
        DALIDataModule(photos, batch_size=4)


def test_other_loaders_are_not_part_of_dali_checkpoints():
    loader = torch.utils.data.DataLoader(torch.arange(4), 2)
    data = DALIDataModule(loader, batch_size=2)
    assert data.state_dict() == {}
    data.load_state_dict({"train": {"epoch": 1, "batch": 1}})
    assert [batch.tolist() for batch in data.train_dataloader()] == [[0, 1], [2, 3]]
