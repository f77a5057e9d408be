from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = batch[0].numpy()  # <- finding: host-sync
        return loss
