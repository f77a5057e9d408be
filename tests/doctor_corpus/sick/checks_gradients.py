import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(torch.sin, x)  # <- finding: gradcheck
        return loss
