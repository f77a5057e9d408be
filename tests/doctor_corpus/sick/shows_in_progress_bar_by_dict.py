from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "half": loss / 2}, prog_bar=True)  # <- finding: progress-bar-sync
        return loss
