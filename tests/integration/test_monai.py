"""MONAI's datasets, loaders, transforms and tensors with metadata, as in training on volumes."""

import random
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from lightning_turbo import ApexAMP, DevicePrefetcher, PackedDataset, PatchDataset, PrefetchDataModule
from lightning_turbo.data import cache_transforms, pack, pack_folder, seed_samples, stamp_files
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import quiet_trainer

monai_data = pytest.importorskip("monai.data")
transforms = pytest.importorskip("monai.transforms")


class Volumes(pl.LightningDataModule):
    def __init__(self, dataset="CacheDataset", loader="DataLoader", num_workers=0):
        super().__init__()
        generator = np.random.default_rng(0)
        items = [
            {"image": generator.normal(size=(1, 10, 9, 8)).astype("float32"), "label": int(i % 3 == 0)}
            for i in range(16)
        ]
        steps = transforms.Compose([
            transforms.ToTensord(keys="image", track_meta=True),
            transforms.NormalizeIntensityd(keys="image"),
            transforms.RandFlipd(keys="image", prob=0.5, spatial_axis=0),
            transforms.RandSpatialCropd(keys="image", roi_size=(8, 8, 8), random_size=False),
            transforms.RandGaussianNoised(keys="image", prob=0.5),
        ])  # fmt: skip
        steps.set_random_state(seed=0)
        more = {"progress": False} if dataset == "CacheDataset" else {}
        self.dataset = getattr(monai_data, dataset)(items, steps, **more)
        self.kind, self.num_workers = getattr(monai_data, loader), num_workers

    def train_dataloader(self):
        return self.kind(self.dataset, batch_size=4, shuffle=True, num_workers=self.num_workers)


class Prefetched(PrefetchDataModule, Volumes):
    pass


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
            nn.Linear(4, 2),
        )  # fmt: skip
        self.losses, self.sums, self.kinds = [], [], set()

    def training_step(self, batch, index):
        self.kinds.add(type(batch["image"]))
        self.sums.append(batch["image"].double().sum().item())
        loss = nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(datamodule, *plugins, **kwargs):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # MONAI's own generators are made from it
    net = Net()
    trainer = quiet_trainer(max_epochs=2, plugins=list(plugins), **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=NoEffectWarning)
        trainer.fit(net, datamodule=datamodule)
    return net


@pytest.mark.parametrize(("dataset", "num_workers"), [("Dataset", 1), ("CacheDataset", 0)])
def test_batches_and_losses_equal_those_of_monais_loader(dataset, num_workers):
    plain = fit(Volumes(dataset, num_workers=num_workers))
    assert plain.kinds == {monai_data.MetaTensor}
    assert len(set(plain.sums)) == 8
    for settings in ({}, {"loader": "ThreadDataLoader"} if num_workers == 0 else {}):
        ours = fit(Prefetched(dataset, num_workers=num_workers, **settings))
        assert (ours.sums, ours.losses, ours.kinds) == (plain.sums, plain.losses, plain.kinds)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_tensors_with_metadata_train_at_every_level(level):
    data = Prefetched()
    meta = fit(data, ApexAMP(level, dtype=torch.bfloat16))

    class Plain(Prefetched):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"image": batch["image"].as_tensor(), "label": batch["label"]}

    plain = fit(Plain(), ApexAMP(level, dtype=torch.bfloat16))
    assert meta.kinds == {monai_data.MetaTensor}
    assert plain.kinds == {torch.Tensor}
    assert meta.losses == plain.losses


def test_device_prefetch_keeps_metadata():
    batch = next(iter(DevicePrefetcher(Volumes().train_dataloader(), "cpu", transform=lambda batch: batch)))
    assert isinstance(batch["image"], monai_data.MetaTensor)
    assert "affine" in batch["image"].meta


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate", ["list_data_collate", "default"])
def test_packed_nifti_pairs_equal_what_monai_reads_from_the_files(tmp_path, num_workers, collate):
    nibabel = pytest.importorskip("nibabel")
    generator = np.random.default_rng(0)
    for n in range(8):
        for folder, volume in (
            ("scans", generator.normal(size=(6, 5, 4))),
            ("masks", generator.random((6, 5, 4)) > 0.5),
        ):
            (tmp_path / folder).mkdir(exist_ok=True)
            image = nibabel.Nifti1Image(volume.astype(np.float32), np.diag([1, 2, 3, 1]))
            nibabel.save(image, tmp_path / folder / f"{n}.nii.gz")
    pack_folder(tmp_path / "scans", tmp_path / "packed", labels=tmp_path / "masks")

    def batches(dataset):
        torch.manual_seed(0)
        collate_fn = monai_data.list_data_collate if collate == "list_data_collate" else None
        loader = torch.utils.data.DataLoader(dataset, 3, shuffle=True, num_workers=num_workers, collate_fn=collate_fn)
        return [(batch["image"], batch["label"]) for batch in loader]

    def steps(first):
        both = ("image", "label")
        compose = transforms.Compose([
            *first,
            transforms.EnsureTyped(both, dtype=torch.float32, track_meta=False),
            transforms.NormalizeIntensityd("image"),
            transforms.RandFlipd(both, prob=0.5, spatial_axis=0),
            transforms.RandSpatialCropd(both, roi_size=(4, 4, 4), random_size=False),
        ])  # fmt: skip
        return compose.set_random_state(seed=0)

    keys = {"image": "volumes", "label": "labels"}
    channel = transforms.EnsureChannelFirstd(tuple(keys), channel_dim="no_channel")
    ours = batches(PackedDataset(tmp_path / "packed", keys=keys, sample_transform=steps([channel])))
    paths = [
        {"image": tmp_path / "scans" / f"{n}.nii.gz", "label": tmp_path / "masks" / f"{n}.nii.gz"} for n in range(8)
    ]
    load = transforms.LoadImaged(tuple(keys), ensure_channel_first=True)
    theirs = batches(monai_data.Dataset(paths, steps([load])))
    assert [image.shape for image, _ in ours] == [(3, 1, 4, 4, 4)] * 2 + [(2, 1, 4, 4, 4)]
    for pair, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))
    affine = monai_data.MetaTensor(transforms.LoadImage()(paths[0]["image"])).affine
    assert torch.equal(PackedDataset(tmp_path / "packed", keys=["affine"])[0], affine)


def test_a_packed_monai_dataset_keeps_the_affine(tmp_path):
    affine = torch.diag(torch.tensor([1.0, 2, 3, 1], dtype=torch.float64))
    items = [{"image": monai_data.MetaTensor(torch.full((1, 2, n + 1), n), affine)} for n in range(3)]
    pack(monai_data.Dataset(items), tmp_path / "out")
    sample = PackedDataset(tmp_path / "out", keys=("image", "image.affine"))[2]
    assert sample[0].tolist() == [[[2, 2, 2]] * 2]
    assert torch.equal(sample[1], affine)
    assert list(PackedDataset(tmp_path / "out")[2]) == ["image"]


def test_transforms_of_monai_and_torchio_accept_patches(tmp_path):
    shapes = [(12, 10, 9), (9, 14, 8)]
    samples = [{"image": np.random.default_rng(n).normal(size=shapes[n]).astype("float32")} for n in range(2)]
    for sample in samples:
        sample["label"] = (sample["image"] > 1).astype("uint8")
    pack(samples, tmp_path / "out", foreground="label")
    both = ("image", "label")
    steps = transforms.Compose([
        transforms.NormalizeIntensityd("image"),
        transforms.RandFlipd(both, prob=0.5, spatial_axis=0),
        transforms.RandAffined(both, prob=1, rotate_range=0.2, mode=("bilinear", "nearest"), padding_mode="border"),
        transforms.RandGaussianNoised("image", prob=0.5),
    ])  # fmt: skip
    data = PatchDataset(tmp_path / "out", (8, 8, 8), per_scan=4, foreground=0.5, transform=steps)

    def batches(**options):
        loader = torch.utils.data.DataLoader(data, 4, collate_fn=monai_data.list_data_collate, **options)
        return [torch.cat([batch["image"], batch["label"]]).as_tensor() for batch in seed_samples(loader, 3)]

    alone = batches()
    assert [batch.shape for batch in alone] == [(8, 1, 8, 8, 8)] * 2
    assert all(map(torch.equal, alone, batches(num_workers=2)))

    torchio = pytest.importorskip("torchio")
    turned = torchio.Compose([torchio.RandomFlip(axes=(0, 1, 2)), torchio.RandomNoise(include=["image"])])
    data.transform = lambda sample: turned(torchio.Subject(
        image=torchio.ScalarImage(tensor=sample["image"]), label=torchio.LabelMap(tensor=sample["label"])
    ))  # fmt: skip
    subject = data[0]
    assert subject["image"].data.shape == subject["label"].data.shape == (1, 8, 8, 8)


def test_a_cached_monai_pipeline_is_inverted_to_the_voxels_of_the_file(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.ones((4, 5, 6), np.int16), np.diag([1, 2, 3, 1])), tmp_path / "a.nii.gz")

    def cached(*more):
        steps = [transforms.LoadImaged("x", ensure_channel_first=True), transforms.Spacingd("x", (2, 2, 2)), *more]
        dataset = monai_data.Dataset([{"x": str(tmp_path / "a.nii.gz")}], transforms.Compose(steps))
        names = [type(step).__name__ for step in steps]
        return cache_transforms(dataset, tmp_path / "cache", key=lambda data: (names, stamp_files(data.data[0]["x"])))

    first = cached()
    assert cached() == first
    sample = PackedDataset(first, keys=("x", "x.affine"))[0]
    assert sample[0].shape == (1, 2, 5, 8)
    # The output of a network is mapped back to the voxels of the file.
    there = transforms.LoadImage(ensure_channel_first=True)(tmp_path / "a.nii.gz")
    back = transforms.ResampleToMatch()(monai_data.MetaTensor(sample[0].float(), affine=sample[1]), there)
    assert back.shape == there.shape
    assert torch.allclose(back[:, 1:-1, 1:-1, 1:-1], there[:, 1:-1, 1:-1, 1:-1].float())
    assert cached(transforms.ScaleIntensityd("x")) != first
    with pytest.raises(ValueError, match="dataset: expected the same sample each time"):
        cached(transforms.RandGaussianNoised("x", prob=0.9))
