"""A small network and its optimizer, initialized as in a plain loop."""

import torch
from torch import nn

from lightning_turbo import amp

LEVELS = ("O0", "O1", "O2", "O3")
INF = float("inf")


def net(*middle, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), *(middle or (nn.Linear(8, 8),)), nn.Linear(8, 2))


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def init(models, optimizers=None, level="O1", **kwargs):
    return amp.initialize(models, optimizers, opt_level=level, **{"dtype": torch.float16, "verbosity": 0, **kwargs})


def ready(level="O1", model=None, make=sgd, **kwargs):
    """A network and its optimizer, initialized."""
    model = net() if model is None else model
    optimizer = make(model)
    init(model, optimizer, level, **kwargs)
    return model, optimizer


def initialized(model, level="O2", **settings):
    """A network and its optimizer, initialized with bfloat16, which needs no loss scale."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return init(model, optimizer, level, **{"dtype": torch.bfloat16, "loss_scale": 1.0, **settings})


def backward(loss, optimizers, **kwargs):
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled:
        scaled.backward()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
