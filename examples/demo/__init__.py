"""The demo, which compares this package with stock Lightning and torch: ``python -m examples.demo``."""
