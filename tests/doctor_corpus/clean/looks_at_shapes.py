from corpus_base import Base


class Model(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        x, _y = batch
        if x.shape[0] > 2 and len(x) and x.numel() and x.dim() == 2 and not x.requires_grad:
            loss = loss / x.size(0)
        for row in x.split(2):
            loss = loss + row.mean() * 0
        return loss
