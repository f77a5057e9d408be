from corpus_base import Base


class Model(Base):
    pass


TRAINER = {"profiler": "advanced"}  # <- finding: profiler
