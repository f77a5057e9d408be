from corpus_base import Base


class Model(Base):
    pass


TRAINER = {"deterministic": True}  # <- finding: deterministic
