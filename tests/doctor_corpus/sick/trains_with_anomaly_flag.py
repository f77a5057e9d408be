from corpus_base import Base


class Model(Base):
    pass


TRAINER = {"detect_anomaly": True}  # <- finding: anomaly-mode
WARNS = "You have turned on `Trainer"
