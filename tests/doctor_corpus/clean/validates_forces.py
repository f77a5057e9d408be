import torch
from corpus_base import Base, loader


class Model(Base):
    def loss(self, batch):
        positions = batch[0].requires_grad_()
        energy = self.net(positions).square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return forces.square().mean()

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            return self.loss(batch)

    def val_dataloader(self):
        return loader()


TRAINER = {"val_check_interval": 2, "limit_val_batches": 2, "inference_mode": False}
