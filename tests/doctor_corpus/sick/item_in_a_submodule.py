from corpus_base import Base
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > -1e9 else -x  # <- finding: host-sync


class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Gate(), nn.Linear(8, 4))
