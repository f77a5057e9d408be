import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        noise = torch.randn(4, 8)
        noise = 0.1 * noise
        return self.loss((batch[0] + noise.to(batch[0].device), batch[1]))  # <- finding: made-on-host
