import torch
from corpus_base import ManualBase


class Model(ManualBase):
    def on_fit_start(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(self.loss(batch)))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # <- finding: clip-before-unscale
        self.scaler.step(optimizer)
        self.scaler.update()
