import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        x = batch[0].clone()
        x[x > 0] = torch.zeros(int(x.numel()))[: int((x > 0).sum())]  # <- finding: host-sync
        return loss
