import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        torch.cuda.empty_cache()  # <- finding: housekeeping
        return loss
