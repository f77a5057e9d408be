"""DALI on a CUDA device: decoding, the same pixels and order as on the CPU, and training with a Trainer."""

import pytest
import torch

from lightning_turbo import ApexAMP, DALIDataModule, DALILoader
from lightning_turbo._lightning import LightningModule
from lightning_turbo.data.dali import ImageFolder
from tests.dali_samples import make_photos, make_volumes
from tests.trainers import quiet_trainer

pytest.importorskip("nvidia.dali")

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), per_class=7)


def batches(recipe, device, **kwargs):
    loader = DALILoader(recipe, 4, device=device, num_threads=2, seed=3, **kwargs)
    result = [tuple(part.cpu() for part in batch) for batch in loader]
    loader.close()
    return result


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_images_equal_those_of_the_cpu(photos, train, dtype):
    recipe = ImageFolder(photos, train=train, size=32, dtype=dtype, channels_last=True, index=True)
    loader = DALILoader(recipe, 4, device="cuda", seed=3)
    images, labels, numbers = next(iter(loader))
    assert {part.device.type for part in (images, labels, numbers)} == {"cuda"}
    assert images.is_contiguous(memory_format=torch.channels_last)
    loader.close()
    # The JPEG decoders and resize kernels differ by a few of 255 levels; a unit here is a standard deviation, about 57.
    limit = 4.0 if dtype == "uint8" else 4.0 / 57
    for ours, reference in zip(batches(recipe, "cuda"), batches(recipe, "cpu"), strict=True):
        assert torch.equal(ours[1], reference[1])
        assert torch.equal(ours[2], reference[2])
        assert (ours[0].float() - reference[0].float()).abs().mean() < limit


def test_volumes_equal_those_of_the_cpu(tmp_path):
    from examples.dali_volumes import volumes

    files, labels = map(list, zip(*make_volumes(tmp_path), strict=True))
    arguments = {"files": files, "labels": labels, "crop": (8, 8, 8)}
    on_gpu, on_cpu = (batches(volumes, device, arguments=arguments) for device in ("cuda", "cpu"))
    for ours, reference in zip(on_gpu, on_cpu, strict=True):
        # The order of sums of 512 float32 values differs.
        torch.testing.assert_close(ours[0], reference[0], atol=1e-4, rtol=1e-4)
        assert torch.equal(ours[1], reference[1])


def test_batches_are_not_overwritten_while_kernels_still_read_them(photos):
    """Each batch is summed by a kernel that is queued after a long one, and freed immediately."""
    recipe = ImageFolder(photos, train=False, size=64)
    expected = [float(images.double().sum()) for images, _ in batches(recipe, "cuda")]
    loader, sums = DALILoader(recipe, 4, device="cuda", prefetch=1), []
    ballast = torch.randn(4096, 4096, device="cuda")
    for images, _ in loader:
        for _ in range(20):
            ballast = ballast @ ballast * 1e-4
        sums.append(images.double().sum())
        del images
    assert [float(value) for value in sums] == pytest.approx(expected, rel=1e-9)
    loader.close()


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 32 * 32, 3)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        assert images.device == labels.device == self.device
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)).float(), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize(
    ("level", "dtype"), [("O0", "float32"), ("O1", "float32"), ("O2", "float16"), ("O3", "float16")]
)
def test_the_trainer_gets_batches_on_its_device(photos, level, dtype):
    data = DALIDataModule(photos, batch_size=4, images={"size": 32, "dtype": dtype})
    trainer = quiet_trainer(accelerator="gpu", max_epochs=2, limit_train_batches=3, plugins=[ApexAMP(level)])
    trainer.fit(Model(), data)
    assert trainer.global_step == 6
