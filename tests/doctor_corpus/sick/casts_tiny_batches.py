from corpus_base import Base


class Model(Base):
    pass


TRAINER = {"precision": "bf16-mixed"}  # <- finding: tiny-amp
