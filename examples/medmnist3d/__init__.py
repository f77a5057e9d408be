"""3D classification of MedMNIST3D, or of a brain template, with every technique a line in a YAML file."""
