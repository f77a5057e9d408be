from corpus_base import Base, loader
from torch.utils.data import DataLoader


class Model(Base):
    def train_dataloader(self):
        return DataLoader(loader().dataset, batch_size=4, num_workers=1)  # <- finding: persistent-workers


TRAINER = {"max_epochs": 2}
