"""Brain volumes to a fixed AUC on a CPU, stock Lightning beside this package: ``python -m examples.speedrun``."""
