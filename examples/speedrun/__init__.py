"""Time to a fixed AUC on a CPU, with stock Lightning and with this package: ``python -m examples.speedrun``."""
