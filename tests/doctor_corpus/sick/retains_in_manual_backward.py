from corpus_base import ManualBase


class Model(ManualBase):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), retain_graph=True)  # <- finding: retain-graph
        optimizer.step()
