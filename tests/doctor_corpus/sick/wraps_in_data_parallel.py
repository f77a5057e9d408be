from corpus_base import Base
from torch import nn


class Model(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.DataParallel(nn.Linear(8, 4))  # <- finding: data-parallel
