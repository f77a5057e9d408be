from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss}, on_epoch=True)
        return loss
