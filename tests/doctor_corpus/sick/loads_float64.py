import torch
from corpus_base import Base
from torch.utils.data import DataLoader, TensorDataset


class Model(Base):
    def training_step(self, batch, batch_idx):
        return self.loss((batch[0].float(), batch[1]))

    def train_dataloader(self):
        data = TensorDataset(torch.ones(28, 8, dtype=torch.float64), torch.zeros(28, dtype=torch.long))
        return DataLoader(data, batch_size=4)  # <- finding: wide-batch
