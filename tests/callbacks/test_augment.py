"""``AugmentBatches`` in a Trainer: the same images with any loader and strategy and after a resume."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import AugmentBatches, Prefetch, PrefetchDataModule, TurboStrategy, augment
from lightning_turbo.data import PrefetchLoader
from lightning_turbo.errors import NoEffectWarning
from tests.integration.recording import Save, gives
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

pytestmark = pytest.mark.filterwarnings("ignore::lightning_turbo.errors.TurboWarning")

IMAGES = torch.rand(12, 1, 6, 8, generator=torch.Generator().manual_seed(0))
DATA = augment.IndexedDataset(TensorDataset(IMAGES, torch.arange(12)))


class RecordingModel(LightningModule):
    """Records the images that its steps and its hook get."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(48, 1)
        self.seen, self.validated, self.hooked = {}, [], []

    def training_step(self, batch, batch_idx):
        for number, image in zip(batch[1].tolist(), batch[0], strict=True):
            self.seen[self.current_epoch, number] = image
        return self.net(batch[0].flatten(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hooked(RecordingModel):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.hooked.append(batch)
        return batch


class Validated(Hooked):
    def validation_step(self, batch, batch_idx):
        self.validated.append(batch[0])


def callback(**settings):
    steps = [augment.RandomAffine(), augment.RandomFlip(), augment.RandomGaussianNoise(p=1.0)]
    return AugmentBatches(augment.BatchAugmentation(steps, seed=3), **settings)


def fit(model, data, *callbacks, ckpt_path=None, **settings):
    trainer = quiet_trainer(**{"max_epochs": 2, "callbacks": [callback(), *callbacks], **settings})
    trainer.fit(model, data, ckpt_path=ckpt_path, **unpickling(bool(ckpt_path)))
    assert "batch_to_device" not in vars(trainer.strategy)
    return model


@pytest.fixture(scope="module")
def expected():
    return fit(RecordingModel(), DataLoader(DATA, batch_size=4)).seen


def assert_same(seen, expected):
    assert seen.keys() == expected.keys()
    assert all(torch.equal(image, expected[key]) for key, image in seen.items())


def test_augmentation_depends_on_the_sample_and_the_epoch(expected):
    assert len(expected) == 24
    assert not any(torch.equal(image, IMAGES[number]) for (_, number), image in expected.items())
    assert not any(torch.equal(expected[0, number], expected[1, number]) for number in range(12))


LEAN = {"lean": KNOWS_WEIGHTS_ONLY}


@pytest.mark.parametrize(
    ("model", "data", "callbacks", "settings"),
    [
        (RecordingModel, lambda: DataLoader(DATA, batch_size=4, num_workers=1), [], {}),
        (RecordingModel, lambda: PrefetchLoader(DATA, batch_size=4, shuffle=True), [], {"strategy": "turbo"}),
        (Hooked, lambda: DataLoader(DATA, batch_size=4, num_workers=2), [lambda: Prefetch(sample_seeds=1)], {}),
        (RecordingModel, lambda: gives(DataLoader(DATA, batch_size=4), PrefetchDataModule), [], {"strategy": "turbo"}),
    ],
    ids=["workers", "turbo", "prefetch", "datamodule"],
)
def test_every_loader_and_strategy_gives_the_same_augmented_images(expected, model, data, callbacks, settings):
    assert_same(fit(model(), data(), *(make() for make in callbacks), **settings).seen, expected)


def test_the_lean_loop_augments(expected):
    assert_same(fit(RecordingModel(), DataLoader(DATA, batch_size=4), strategy=TurboStrategy(**LEAN)).seen, expected)


def test_a_resumed_run_augments_as_an_uninterrupted_one(expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = lambda: DataLoader(DATA, batch_size=4)  # noqa: E731
    fit(RecordingModel(), data(), Prefetch(), Save("mid.ckpt", 2, "on_train_batch_end"))
    seen = fit(RecordingModel(), data(), Prefetch(), ckpt_path="mid.ckpt").seen
    assert len(seen) == 16
    assert_same(seen, {key: expected[key] for key in seen})


def test_validation_is_augmented_only_on_request(expected):
    loaders = {"train_dataloaders": DataLoader(DATA, batch_size=4), "val_dataloaders": DataLoader(DATA, batch_size=4)}
    for settings, changed in (({}, False), ({"training_only": False}, True)):
        model = Validated()
        trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[callback(**settings)])
        trainer.fit(model, **loaders)
        assert torch.equal(torch.cat(model.validated), IMAGES) != changed
        assert_same(model.seen, {key: image for key, image in expected.items() if key[0] == 0})
        # The hook of the module gets batches that are not augmented yet.
        assert torch.equal(torch.cat([batch[0] for batch in model.hooked]), torch.cat([IMAGES, IMAGES]))


FLIP, NORMALIZE = augment.RandomFlip([-1], p=1.0), augment.NormalizeIntensity()


@pytest.mark.parametrize("settings", [{}, {"strategy": "turbo"}, {"strategy": TurboStrategy(**LEAN)}])
def test_several_augment_callbacks_run_in_order(settings):
    """Each has its own seed. One changes only training batches, the other one all batches."""
    once = augment.BatchAugmentation([FLIP, NORMALIZE], 3)
    noise = [augment.BatchAugmentation([augment.RandomGaussianNoise(p=1.0)], seed) for seed in (5, 6)]
    expected = {}
    for epoch in range(2):
        for each in (once, *noise):
            each.set_epoch(epoch)
        image, index = once((IMAGES,), range(12))[0], range(12)
        for each in noise:
            image = each((image,), index)[0]
        expected.update({(epoch, number): image[number] for number in range(12)})
    callbacks = [
        AugmentBatches(augment.BatchAugmentation([FLIP], 3)),
        AugmentBatches(augment.BatchAugmentation([NORMALIZE], 1), training_only=False),
        *map(AugmentBatches, noise),
    ]
    model, loader = Validated(), DataLoader(DATA, batch_size=4)
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks, **settings)
    trainer.fit(model, loader, DataLoader(DATA, batch_size=4))
    assert_same(model.seen, expected)
    assert torch.equal(torch.cat(model.validated[:3]), NORMALIZE.change(IMAGES))
    assert "batch_to_device" not in vars(trainer.strategy)


def test_augmentation_refuses_batches_without_indices_and_leaves_nothing_behind():
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback()])
    with pytest.raises(ValueError, match="IndexedDataset"):
        trainer.fit(RecordingModel(), DataLoader(DATA.dataset, batch_size=4))
    assert "batch_to_device" not in vars(trainer.strategy)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_with_dataloader_iter_warns_that_it_is_not_augmented():
    class Itself(RecordingModel):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.net(batch.data[0].flatten(1)).square().mean()

    with pytest.warns(NoEffectWarning, match="AugmentBatches has no effect"):
        fit(Itself(), DataLoader(DATA, batch_size=4), max_epochs=1)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="expected a BatchAugmentation"):
        AugmentBatches([augment.RandomFlip()])
    with pytest.raises(TypeError, match="training_only"):
        callback(training_only=1)
