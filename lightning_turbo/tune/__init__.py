"""``lightning-turbo tune``: measures what makes a training script faster on this machine."""

# Nothing is imported here, because a tune process must not choose a copy of Lightning before the script does.
__all__: list[str] = []
