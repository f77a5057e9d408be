from corpus_base import ManualBase


class Model(ManualBase):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.zero_grad(set_to_none=False)  # <- finding: gradients-kept
        self.manual_backward(self.loss(batch))
        optimizer.step()
