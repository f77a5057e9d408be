"""Batches on their way to a device."""

import torch

from lightning_turbo._pytree import move_batch


class Unreadable:
    """Moves itself by a method whose arguments Python cannot tell, like one of an extension in C."""

    def to(self, device):
        return self, device

    to.__signature__ = 0


def test_an_object_whose_arguments_cannot_be_read_is_moved_without_further_ones():
    device = torch.device("cpu")
    batch = Unreadable()
    assert move_batch({"object": batch}, device)["object"] == (batch, device)
