import torch
from corpus_base import Base
from torch import nn


class Model(Base):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            x = self.frozen(batch[0])
        return self.loss((x, batch[1]))
