import random

import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if random.random() < 0.5:
            loss = loss * 1.0
        if torch.rand(1) < 0.5:
            loss = loss + 0.0
        self.last = torch.randint(0, 4, (1,)).item()
        return loss
