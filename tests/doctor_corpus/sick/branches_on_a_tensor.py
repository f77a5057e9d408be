import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if torch.isnan(loss):  # <- finding: host-sync
            return None
        return loss
