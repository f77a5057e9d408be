import torch
from corpus_base import ManualBase


class Model(ManualBase):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # <- finding: clips-nothing
        self.manual_backward(self.loss(batch))
        optimizer.step()
