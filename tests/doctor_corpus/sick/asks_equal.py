import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = torch.equal(batch[1], batch[1] + 1)  # <- finding: host-sync
        return loss
