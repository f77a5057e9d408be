from corpus_base import Base, loader


class Model(Base):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def val_dataloader(self):
        return loader()


TRAINER = {"val_check_interval": 2, "limit_val_batches": 2}
