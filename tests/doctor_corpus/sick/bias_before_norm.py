from corpus_base import Base, image_loader
from torch import nn


class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(  # <- finding: bias-before-norm
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(64, 4),
        )

    def train_dataloader(self):
        return image_loader()
