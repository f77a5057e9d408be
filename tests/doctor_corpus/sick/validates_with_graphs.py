import torch
from corpus_base import Base, loader


class Model(Base):
    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():  # <- finding: validation-graph
            return self.loss(batch)

    def val_dataloader(self):
        return loader()


TRAINER = {"val_check_interval": 2, "limit_val_batches": 1, "inference_mode": False}
