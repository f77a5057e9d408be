from corpus_base import Base
from torch.nn import functional as F


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = F.one_hot(batch[1])  # <- finding: host-sync
        return loss
