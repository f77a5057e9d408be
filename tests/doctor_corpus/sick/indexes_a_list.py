from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = [1, 2, 3, 4][batch[1][0]]  # <- finding: host-sync
        return loss
