import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        x = torch.tensor(batch[0])  # <- finding: array-copy
        return self.loss((x, batch[1]))


WARNS = "To copy construct from a tensor"
