from corpus_base import Base


class Model(Base):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last = outputs["loss"].item()  # <- finding: host-sync
