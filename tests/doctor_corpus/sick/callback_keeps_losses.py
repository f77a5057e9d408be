from corpus_base import Base
from lightning.pytorch import Callback


class Keep(Callback):
    def __init__(self):
        self.kept = []

    def on_before_backward(self, trainer, pl_module, loss):
        self.kept.append(loss)  # <- finding: retained-graph


class Model(Base):
    pass


TRAINER = {"callbacks": [Keep()]}
