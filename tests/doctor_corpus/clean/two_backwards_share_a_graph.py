from corpus_base import ManualBase


class Model(ManualBase):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(2 * loss)
        optimizer.step()
