from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + batch[0].masked_select(batch[0] > 0).mean()  # <- finding: host-sync
