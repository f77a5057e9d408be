import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + torch.randn(4, device=self.device).mean() + torch.arange(4, device=batch[0].device).sum()
