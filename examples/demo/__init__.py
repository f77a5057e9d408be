"""Levels on digits, then what ``lightning-turbo tune`` finds for volumes: ``python -m examples.demo``."""
