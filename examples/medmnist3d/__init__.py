"""3D classification of MedMNIST3D or of a brain template. Each technique is a line of a YAML file."""
