import torch
from corpus_base import Base


class Model(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        epochs = self.trainer.max_epochs + 1  # one to spare, for torch refuses a step after the last one
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs)]


TRAINER = {"max_epochs": 2}
WARNS = "A `OneCycleLR` scheduler"
