import torch
from corpus_base import Base
from torch import nn


class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
