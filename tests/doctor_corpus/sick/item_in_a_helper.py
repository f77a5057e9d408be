from corpus_base import Base


def accuracy(logits, y):
    return (logits.argmax(-1) == y).float().mean().item()  # <- finding: host-sync


class Model(Base):
    def training_step(self, batch, batch_idx):
        self.log("accuracy", accuracy(self.net(batch[0]), batch[1]))
        return self.loss(batch)
