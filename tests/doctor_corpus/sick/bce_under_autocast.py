import torch
from corpus_base import Base
from torch.nn import functional as F


class Model(Base):
    def training_step(self, batch, batch_idx):
        p = self.net(batch[0]).sigmoid()
        return F.binary_cross_entropy(p, torch.zeros_like(p))  # <- finding: bce-under-amp


TRAINER = {"precision": "bf16-mixed"}
