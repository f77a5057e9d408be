from corpus_base import Base, loader


class Model(Base):
    def validation_step(self, batch, batch_idx):
        return self.loss(batch)

    def val_dataloader(self):
        return loader()


TRAINER = {"limit_val_batches": 1, "inference_mode": False}  # <- finding: validation-graph
