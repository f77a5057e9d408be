from corpus_base import Base


class Model(Base):
    def __init__(self):
        super().__init__()
        self.outputs = {}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outputs[batch_idx] = {"loss": loss}  # <- finding: retained-graph
        return loss
