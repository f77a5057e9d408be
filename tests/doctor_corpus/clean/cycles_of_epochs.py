import torch
from corpus_base import Base


class Model(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2)]


TRAINER = {"max_epochs": 4}
