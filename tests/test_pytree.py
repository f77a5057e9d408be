"""Traversals of the tensors in a batch with shared or cyclic references."""

import dataclasses
from types import MappingProxyType

import pytest
import torch

from lightning_turbo._pytree import map_tensors, move_batch, tensors_in


class Node:
    """A tree whose children refer to their parents."""

    def __init__(self, x, parent=None):
        self.x, self.parent, self.children = x, parent, []
        if parent is not None:
            parent.children.append(self)

    def to(self, where):
        raise NotImplementedError


@dataclasses.dataclass(eq=False)
class Ring:
    x: torch.Tensor
    after: "Ring | None" = None
    seen: dict = dataclasses.field(default_factory=dict)


def double(tensor):
    return tensor.double()


def test_a_tree_with_references_to_parents():
    root = Node(torch.ones(1))
    child = Node(torch.full((1,), 2.0), root)
    Node(torch.full((1,), 3.0), child)
    twin = map_tensors({"tree": root}, double)["tree"]
    (below,) = twin.children
    (lowest,) = below.children
    assert below.parent is twin
    assert lowest.parent is below
    assert [node.x.item() for node in (twin, below, lowest)] == [1.0, 2.0, 3.0]
    assert {node.x.dtype for node in (twin, below, lowest)} == {torch.float64}
    assert root.x.dtype is torch.float32  # the argument is not changed
    assert child.parent is root


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_cycle_of_dataclasses_stays_a_cycle(length):
    rings = [Ring(torch.full((1,), float(i))) for i in range(length)]
    for ring, after in zip(rings, [*rings[1:], rings[0]], strict=True):
        ring.after = after
        ring.seen["before"] = ring
    twin = map_tensors(rings[0], double)
    each, values = twin, []
    for _ in range(length):
        assert each.seen["before"] is each
        assert each.x.dtype is torch.float64
        values.append(each.x.item())
        each = each.after
    assert each is twin
    assert values == list(range(length))
    assert len(tensors_in(rings[0])) == length


def test_shared_objects_stay_shared_and_unchanged_ones_are_not_copied():
    @dataclasses.dataclass
    class Holds:
        x: torch.Tensor

    def widen(tensor):
        return tensor.double() if tensor.is_floating_point() else tensor

    shared, whole = Holds(torch.ones(1)), Holds(torch.ones(1, dtype=torch.int64))
    first, second, kept = map_tensors((shared, [shared], whole), widen)
    assert first is second[0]
    assert first.x.dtype is torch.float64
    assert kept is whole


def test_a_read_only_mapping_becomes_a_dict_where_a_tensor_changes():
    whole = MappingProxyType({"x": torch.ones(1), "name": "a"})
    twin = map_tensors(whole, double)
    assert type(twin) is dict
    assert (twin["x"].dtype, twin["name"]) == (torch.float64, "a")
    assert whole["x"].dtype is torch.float32
    assert map_tensors(whole, lambda tensor: tensor) is whole


class Unreadable:
    """Moves itself by a method whose arguments Python cannot tell, like one of an extension in C."""

    def to(self, device):
        return self, device

    to.__signature__ = 0


def test_an_object_whose_arguments_cannot_be_read_is_moved_without_further_ones():
    device = torch.device("cpu")
    batch = Unreadable()
    assert move_batch({"object": batch}, device)["object"] == (batch, device)
