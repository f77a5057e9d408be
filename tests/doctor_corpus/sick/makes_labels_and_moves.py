import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + torch.tensor([1.0, 2.0]).to(device=self.device).mean()  # <- finding: made-on-host
