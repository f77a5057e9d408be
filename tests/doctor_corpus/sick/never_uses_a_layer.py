from corpus_base import Base
from torch import nn


class Model(Base):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)  # <- finding: unused-parameters
