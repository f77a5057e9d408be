"""What the suite ``getitem`` compares gives the same batches."""

import pytest
import torch

from benchmarks.getitem import CALL, KINDS, LIST, LOADERS, ONE, STACK, make_loader
from tests.data.batches import differences

WAYS = [(kind, way) for kind in KINDS for way in (CALL, LIST, STACK) if kind == "cells" or way != STACK]


@pytest.mark.parametrize("by", LOADERS)
@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_all_ways_give_the_same_batches(kind, way, by):
    found = []
    for each, loader in ((ONE, "DataLoader"), (way, by)):
        torch.manual_seed(0)
        found.append(list(make_loader(KINDS[kind](rows=700), each, loader)))
    assert len(found[0]) == 5
    assert differences(*found) == []
