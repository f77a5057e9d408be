import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        x = torch.where(batch[0] > 0, batch[0], torch.zeros_like(batch[0]))
        x[x > 1] = 1.0
        return loss + x.mean() + batch[0].new_zeros(3).sum()
