"""``lightning-turbo tune``: what makes a training script faster on this machine, found by measurement."""

# Nothing is imported here: a process of tune must not choose a copy of Lightning before the script does.
__all__: list[str] = []
