from corpus_base import Base
from lightning.pytorch import Callback


class Remember(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.last = outputs["loss"].item()  # <- finding: host-sync


class Model(Base):
    pass


TRAINER = {"callbacks": [Remember()]}
