from corpus_base import Base
from torch import nn
from torch.nn import functional as F


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = []

    def update(self, logits):
        self.all.append(logits)  # <- finding: retained-graph


class Model(Base):
    def __init__(self):
        super().__init__()
        self.scores = Scores()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.scores.update(logits)
        return F.cross_entropy(logits, batch[1])
