"""Augment whole batches on the device: 3D segmentation of gray matter in patches of a brain template.

Run it with ``python examples/augment.py``. It trains a small network on patches of the MNI152 template, which nilearn
includes (``pip install '.[demo]'`` in a clone), and prints the loss. With ``--picture FILE``, it draws the result of
each transform instead.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_turbo import AugmentBatches, augment

STEPS = [
    augment.RandomAffine(degrees=20, scale=(0.8, 1.25)),
    augment.RandomFlip(),
    augment.RandomElastic((0, 3), p=0.3),
    augment.RandomGaussianNoise((0, 0.1), p=0.3),
    augment.RandomGaussianBlur(p=0.2),
    augment.RandomGamma(p=0.3),
    augment.RandomCrop((32, 32, 32)),
]


def brain():
    """Return the template and its gray matter mask as tensors with a channel dimension."""
    from nilearn import datasets

    image = datasets.load_mni152_template(resolution=2).get_fdata(dtype="float32")
    mask = datasets.load_mni152_gm_mask(resolution=2).get_fdata(dtype="float32")
    return torch.from_numpy(image)[None], torch.from_numpy(mask)[None].long()


class Patches(Dataset):
    """Patches of 40 x 40 x 40 voxels from random positions in the brain."""

    def __init__(self, length=64):
        self.image, self.mask = brain()
        self.corners = torch.randint(0, 55, (length, 3), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self):
        return len(self.corners)

    def __getitem__(self, index):
        window = (slice(None), *(slice(corner, corner + 40) for corner in self.corners[index]))
        return {"image": self.image[window], "mask": self.mask[window]}


class Segmentation(LightningModule):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Conv3d(8, 2, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["image"]), batch["mask"][:, 0])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(epochs):
    """Train and return the mean loss of the last epoch."""
    loader = DataLoader(augment.IndexedDataset(Patches()), batch_size=8, shuffle=True)
    augmentation = augment.BatchAugmentation(STEPS, seed=0, image="image", mask="mask")
    trainer = Trainer(
        max_epochs=epochs, callbacks=[AugmentBatches(augmentation)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Segmentation(), loader)
    return float(trainer.callback_metrics["loss"])


# Each transform, strong enough to be visible.
SHOWN = {
    "before": [],
    "RandomAffine": [augment.RandomAffine(25, (0.7, 1.3), shear=10)],
    "RandomFlip": [augment.RandomFlip([1], p=1.0)],
    "RandomElastic": [augment.RandomElastic((8, 8), p=1.0)],
    "RandomCrop": [augment.RandomCrop((60, 90, 60))],
    "RandomGamma": [augment.RandomGamma((2.0, 2.0), p=1.0)],
    "RandomContrast": [augment.RandomContrast((0.4, 0.4), p=1.0)],
    "RandomBrightness": [augment.RandomBrightness((0.5, 0.5), p=1.0)],
    "RandomGaussianNoise": [augment.RandomGaussianNoise((0.15, 0.15), p=1.0)],
    "RandomGaussianBlur": [augment.RandomGaussianBlur((2.0, 2.0), p=1.0)],
    "RandomLowResolution": [augment.RandomLowResolution((0.25, 0.25), p=1.0)],
    "MixUp": [augment.MixUp(2, alpha=8)],
    "CutMix": [augment.CutMix(2)],
    "NormalizeIntensity": [augment.NormalizeIntensity()],
}


def draw(path):
    """Draw the middle slice of the first of two samples, with the outline of its mask, after each transform."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    image, mask = brain()
    # The second sample is shifted, so that the picture shows what MixUp and CutMix add to the first one.
    batch = [torch.stack([part[:, :, 8:108], part[:, :, 8:108].roll(25, 3)]) for part in (image, mask)]
    figure, axes = plt.subplots(2, 7, figsize=(14, 5.6), layout="constrained")
    for axis, (name, steps) in zip(axes.flat, SHOWN.items(), strict=True):
        mixes = name in ("MixUp", "CutMix")
        parts = {"image": batch[0], "label": torch.tensor([0, 1])} | ({} if name == "MixUp" else {"mask": batch[1]})
        names = {"mask": None if name == "MixUp" else "mask", "label": "label" if mixes else None}
        output = augment.BatchAugmentation(steps, seed=7, image="image", **names)(parts, [0, 1])
        middle = output["image"].shape[-1] // 2
        high = {"NormalizeIntensity": 2.0}.get(name, 1.0)
        axis.imshow(output["image"][0, 0, :, :, middle].T, cmap="gray", origin="lower", vmin=0, vmax=high)
        if name != "MixUp":
            axis.contour(output["mask"][0, 0, :, :, middle].T.float(), [0.5], colors="tab:orange", linewidths=0.5)
        label = f"\nlabel {output['label'][0].tolist()[0]:.2f}, {output['label'][0].tolist()[1]:.2f}" if mixes else ""
        axis.set_title(name + label, fontsize=10)
        axis.set_axis_off()
    figure.savefig(path, dpi=64)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--picture", metavar="FILE")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs: expected an integer of 1 or more, got {options.epochs}")
    if options.picture:
        draw(options.picture)
        print(f"wrote {options.picture}")
    else:
        print(f"loss after {options.epochs} epochs: {train(options.epochs):.3f}")


if __name__ == "__main__":
    main()
