import torch
from corpus_base import Base
from torch.utils.data import DataLoader, Dataset


class Epochs(Dataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 28

    def __getitem__(self, i):
        return torch.ones(8) * self.epoch, i % 4


class Model(Base):
    def train_dataloader(self):
        return DataLoader(  # <- finding: frozen-set-epoch
            Epochs(), batch_size=4, num_workers=1, persistent_workers=True
        )
