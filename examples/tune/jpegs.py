"""Each sample is a JPEG that is decoded and resized: loading during the training steps helps. Requires Pillow."""

import io

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """Noise of 400 x 400 pixels in three hues, stored as JPEG in memory. The label is the hue."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.files = []
        for number in range(48):
            pixels = draw.integers(0, 256, (400, 400, 3), dtype=np.uint8)
            pixels[..., number % 3] //= 4
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index):
        with Image.open(io.BytesIO(self.files[index % 48])) as image:
            pixels = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR), dtype=np.float32)
        return torch.from_numpy(pixels.transpose(2, 0, 1) / 255), index % 48 % 3


class Classifier(LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 3)
        )

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train for two epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other cores are for loading
    loader = DataLoader(Pictures(), batch_size=16, shuffle=True)
    Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)


if __name__ == "__main__":
    main()
