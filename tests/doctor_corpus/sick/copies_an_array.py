import numpy as np
import torch
from corpus_base import Base
from torch.nn import functional as F

WEIGHTS = np.ones(4, dtype=np.float32)


class Model(Base):
    def training_step(self, batch, batch_idx):
        weights = torch.tensor(WEIGHTS)  # <- finding: array-copy
        return F.cross_entropy(self.net(batch[0]), batch[1], weights)
