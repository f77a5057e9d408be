import torch
from corpus_base import Base
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(28):
            yield {"x": torch.ones(8), "y": i % 4}


class Model(Base):
    def training_step(self, batch, batch_idx):
        return self.loss((batch["x"], batch["y"]))

    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=4)
