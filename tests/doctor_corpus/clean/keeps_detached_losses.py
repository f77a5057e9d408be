from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses = [*getattr(self, "losses", []), loss.detach()]
        return loss
