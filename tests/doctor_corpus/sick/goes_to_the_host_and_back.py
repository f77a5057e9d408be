from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        order = batch[1].cpu()
        order = order.to(self.device)  # <- finding: round-trip
        return self.loss((batch[0], order))
