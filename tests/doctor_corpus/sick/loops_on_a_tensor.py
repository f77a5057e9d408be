from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        while loss > 1:  # <- finding: host-sync
            loss = loss / 2
        return loss
