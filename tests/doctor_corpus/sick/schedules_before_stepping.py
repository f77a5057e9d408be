import torch
from corpus_base import ManualBase


class Model(ManualBase):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.lr_schedulers().step()  # <- finding: before-optimizer
        optimizer.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


WARNS = "Detected call of `lr_scheduler.step"
