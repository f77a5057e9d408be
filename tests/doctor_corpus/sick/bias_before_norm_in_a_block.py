from corpus_base import Base
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)  # <- finding: bias-before-norm

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(), nn.Linear(8, 4))
