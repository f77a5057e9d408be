"""Segmentation of 3D scans, from a folder of files to a checkpoint: ``python -m examples.segmentation3d``."""
