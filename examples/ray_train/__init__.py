"""Ray Train with a worker that is killed in mid-epoch: ``python -m examples.ray_train``."""
