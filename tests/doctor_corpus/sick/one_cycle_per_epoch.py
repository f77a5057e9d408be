import torch
from corpus_base import Base


class Model(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 12)  # <- finding: stepped-per-epoch
        return {"optimizer": optimizer, "lr_scheduler": schedule}


WARNS = "A `OneCycleLR` scheduler"
