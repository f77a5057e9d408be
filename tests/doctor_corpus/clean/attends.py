from corpus_base import Base
from torch import nn
from torch.nn import functional as F


class Model(Base):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(self.encoder(batch[0].unsqueeze(1)).squeeze(1)), batch[1])
