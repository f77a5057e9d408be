from corpus_base import Base

from lightning_turbo import ExactAccumulation


class Model(Base):
    pass


TRAINER = {"accumulate_grad_batches": 4, "callbacks": [ExactAccumulation()]}
