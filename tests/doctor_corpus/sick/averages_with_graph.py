import torch
from corpus_base import Base


class Model(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.average = 0.9 * self.average + 0.1 * loss  # <- finding: retained-graph
        return loss
