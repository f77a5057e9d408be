import torch
from corpus_base import Base
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 14

    def __getitem__(self, i):
        return torch.arange(3 * 600 * 600).remainder(256).view(3, 600, 600) / 255, i % 4


class Model(Base):
    def training_step(self, batch, batch_idx):
        return self.loss((batch[0][:, 0, 0, :8], batch[1]))

    def train_dataloader(self):
        return DataLoader(Pictures(), batch_size=2)  # <- finding: wide-batch
