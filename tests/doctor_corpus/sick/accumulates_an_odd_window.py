from corpus_base import Base


class Model(Base):
    pass


TRAINER = {"accumulate_grad_batches": 4}  # <- finding: short-window
