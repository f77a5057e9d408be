from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.last = batch[0].repeat_interleave(batch[1], dim=0)  # <- finding: host-sync
        return loss
