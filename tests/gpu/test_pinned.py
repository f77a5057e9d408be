"""Which tensors of a batch are in pinned memory, and that a batch of any structure comes to the device as it is."""

import dataclasses
from collections import UserDict

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo import DevicePrefetcher, PrefetchLoader
from tests.data.samples import Pair, Scan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


def parts(indices):
    """Return small tensors, one in half precision and one in another order of its axes, and a large one."""
    numbers = torch.tensor(indices)
    half = numbers.bfloat16()
    return [numbers.float(), half, torch.stack([numbers] * 3).t(), numbers[:0], torch.ones(200, 200) * numbers[0]]


def a_dict(indices):
    return {"x": parts(indices), "name": "name"}


def a_namedtuple(indices):
    return Pair(parts(indices)[0], parts(indices))


def a_dataclass(indices):
    return Scan(parts(indices), "name")


def a_user_dict(indices):
    return UserDict(x=parts(indices), name="name")


def tensors(batch):
    """Return the tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, (dict, UserDict)):
        batch = list(batch.values())
    if dataclasses.is_dataclass(batch):
        batch = list(vars(batch).values())
    return [tensor for part in batch for tensor in tensors(part)] if isinstance(batch, (list, tuple)) else []


COLLATES = pytest.mark.parametrize("collate", [a_dict, a_namedtuple, a_dataclass, a_user_dict])
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@WORKERS
@COLLATES
def test_what_a_plain_loader_pins_is_pinned(collate, workers):
    settings = {"batch_size": 4, "collate_fn": collate, "num_workers": workers, "pin_memory": True}
    loaders = (kind(range(16), **settings) for kind in (DataLoader, PrefetchLoader))
    for plain, batch in zip(*loaders, strict=True):
        assert type(batch) is type(plain)
        for one, other in zip(tensors(batch), tensors(plain), strict=True):
            assert one.is_pinned() or not (other.is_pinned() and other.numel())
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@WORKERS
@COLLATES
def test_a_batch_comes_to_the_device_as_it_is(collate, workers):
    loader = PrefetchLoader(range(16), batch_size=4, collate_fn=collate, num_workers=workers)
    plain = DataLoader(range(16), batch_size=4, collate_fn=collate)
    for batch, expected in zip(DevicePrefetcher(loader, "cuda:0", min_bytes=0), plain, strict=True):
        assert type(batch) is type(expected)
        for one, other in zip(tensors(batch), tensors(expected), strict=True):
            assert one.is_cuda
            assert one.dtype == other.dtype
            assert torch.equal(one.cpu(), other)
