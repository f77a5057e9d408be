"""A training loop written for apex, with one import changed, on digits at each level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from examples.demo.data import load_digits
from examples.demo.model import DemoNet
from lightning_turbo import amp  # was: from apex import amp


def train(level: str, epochs: int, device: str) -> dict[str, Any]:
    """Train on digits as scripts for apex do, and return the validation accuracy and the losses."""
    data = load_digits(seed=0)
    torch.manual_seed(0)
    model = DemoNet(dims=data.dims, classes=data.classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for _ in range(epochs):
        for images, labels in DataLoader(data.train, data.batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        images, labels = data.val.tensors
        correct = model(images.to(device)).argmax(1).cpu() == labels
    amp.shutdown()
    return {"accuracy": correct.float().mean().item(), "losses": losses}


def measure(levels: Sequence[str], epochs: int, device: str, step: Callable[[str], Any]) -> dict[str, Any]:
    """Return the results of each level. ``step`` is called with the name of each step before it starts."""
    rows = {}
    for level in levels:
        step(f"an apex loop at {level}")
        rows[level] = train(level, epochs, device)
    return rows
