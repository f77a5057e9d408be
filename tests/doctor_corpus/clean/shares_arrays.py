import numpy as np
import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + torch.as_tensor(np.ones(3), dtype=torch.float32).sum() * 0
