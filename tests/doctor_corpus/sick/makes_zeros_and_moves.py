import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + torch.zeros(3).to(self.device).sum()  # <- finding: made-on-host
