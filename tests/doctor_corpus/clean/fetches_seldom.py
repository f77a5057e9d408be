from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx % 50 == 0:
            self.last = loss.item()
        return loss
