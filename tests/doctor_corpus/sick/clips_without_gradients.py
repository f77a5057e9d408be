import torch
from corpus_base import ManualBase

from lightning_turbo import ApexAMP

TRAINER = {"plugins": [ApexAMP("O2", dtype=torch.bfloat16)]}


class Model(ManualBase):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # <- finding: clips-nothing
        optimizer.step()
