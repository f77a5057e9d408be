import torch
from corpus_base import Base


class Model(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2)  # <- finding: cycled-beta
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
