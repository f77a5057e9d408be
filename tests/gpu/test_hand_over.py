"""Batches from worker processes: one buffer is pinned, regardless of the number of tensors in it."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading.device import DeviceTransfer

pytestmark = pytest.mark.gpu


class Boxes(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"image": torch.full((3, 8, 8), float(index)), "boxes": torch.ones(index % 4, 4), "label": index}


@pytest.mark.parametrize("pin_memory", [False, True])
def test_one_buffer_is_pinned_for_a_batch(monkeypatch, pin_memory):
    pinned = []
    empty, pin = torch.empty, torch.Tensor.pin_memory

    def noting_empty(*args, **kwargs):
        pinned.extend(["buffer"] * kwargs.get("pin_memory", False))
        return empty(*args, **kwargs)

    def noting_pin(tensor, *args, **kwargs):
        pinned.append("tensor")
        return pin(tensor, *args, **kwargs)

    monkeypatch.setattr(torch, "empty", noting_empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", noting_pin)
    settings = {"batch_size": 16, "num_workers": 1, "collate_fn": list, "pin_memory": pin_memory}
    loader = PrefetchLoader(Boxes(), transfer=DeviceTransfer("cuda"), **settings)
    batches = list(loader)
    assert len(batches) == 4
    assert pinned == ["buffer"] * 4
    for batch, plain in zip(batches, DataLoader(Boxes(), 16, collate_fn=list), strict=True):
        for sample, other in zip(batch, plain, strict=True):
            assert sample["label"] == other["label"]
            assert sample["image"].is_cuda
            assert all(torch.equal(sample[name].cpu(), other[name]) for name in ("image", "boxes"))


def test_tensors_of_a_pinned_batch_are_pinned():
    loader = PrefetchLoader(Boxes(), batch_size=8, num_workers=1, collate_fn=list, pin_memory=True)
    for batch in loader:
        assert all(sample["image"].is_pinned() for sample in batch)
