import torch
from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        with torch.autograd.detect_anomaly():  # <- finding: anomaly-mode
            return self.loss(batch)


WARNS = "Anomaly Detection has been enabled"
