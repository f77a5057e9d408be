import torch
from corpus_base import Base


class Model(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        for _ in range(100):  # its steps are finer than the optimizer's
            schedule.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 600)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
