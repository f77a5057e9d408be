"""3D segmentation, from a folder of scans to a checkpoint: ``python -m examples.segmentation3d``."""
