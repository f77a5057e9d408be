import torch
from corpus_base import Base

from lightning_turbo import ApexAMP


class Model(Base):
    pass


TRAINER = {"plugins": [ApexAMP("O2", dtype=torch.bfloat16)]}
