import torch
from corpus_base import Base


class Model(Base):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), foreach=False)  # <- finding: loop-optimizer
