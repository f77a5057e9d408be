from corpus_base import Base


class Model(Base):
    pass


TRAINER = {"accumulate_grad_batches": 7, "gradient_clip_val": 1.0}
