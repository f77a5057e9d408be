"""The suite ``precision``: O0 to O3, Lightning's precisions, plain PyTorch loops, and other libraries."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.peers import train_with_accelerate, train_with_apex, train_with_composer
from benchmarks.suite import Aim, Case, CaseTimer, Suite
from benchmarks.work import DTYPES, Endless, conv_net, image_batches, plain_loop, sgd

__all__ = ["SUITE", "autocast", "half_inputs", "plain_o2"]


def _task(timer: CaseTimer) -> tuple[nn.Module, Endless]:
    """Return the network and its batches on the device."""
    net = conv_net(10, width=16 if timer.quick else 32)
    return net.to(timer.device), Endless(image_batches(timer, (3, 32, 32), 10, 32))


def autocast(timer: CaseTimer, net: nn.Module, loader: Endless, optimizer: Any, dtype: str) -> dict[str, float]:
    """Run a plain loop with autocast, and with a gradient scaler if ``dtype`` is ``"fp16"``."""
    forward = partial(torch.autocast, timer.device.type, DTYPES[dtype])
    if dtype != "fp16":
        return plain_loop(timer, net, loader, optimizer, forward=forward)
    scaler = torch.amp.GradScaler(timer.device.type)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def backward(loss: Tensor) -> None:
        scaler.scale(loss).backward()

    return plain_loop(timer, net, loader, optimizer, forward=forward, backward=backward, step=step)


def plain(timer: CaseTimer, *, dtype: str = "", channels_last: bool = False, fused: bool = False) -> dict[str, float]:
    """Run a plain loop, in float32 or with autocast."""
    net, loader = _task(timer)
    if channels_last:
        net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        loader.batches = [(x.to(memory_format=torch.channels_last), y) for x, y in loader.batches]
    optimizer = sgd(net.parameters(), fused=fused)
    return autocast(timer, net, loader, optimizer, dtype) if dtype else plain_loop(timer, net, loader, optimizer)


def half_inputs(net: nn.Module) -> None:
    """Add a hook to a network that casts its input to bfloat16."""
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(torch.bfloat16),))


def plain_o2(timer: CaseTimer, net: nn.Module, loader: Endless) -> dict[str, float]:
    """Run O2 written by hand in bfloat16: half weights, float32 batch norm and masters, foreach copies."""
    masters: list[Tensor] = [parameter.detach().clone() for parameter in net.parameters()]
    net.to(torch.bfloat16)
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.float()
    half_inputs(net)
    weights: list[Tensor] = list(net.parameters())
    optimizer = sgd(masters)
    gradients = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient

    def step() -> None:
        torch._foreach_copy_(gradients, [weight.grad for weight in weights if weight.grad is not None])
        for weight in weights:
            weight.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return plain_loop(timer, net, loader, optimizer, step=step)


def o2_by_hand(timer: CaseTimer) -> dict[str, float]:
    """Run O2 written by hand."""
    return plain_o2(timer, *_task(timer))


def plain_half(timer: CaseTimer) -> dict[str, float]:
    """Run a plain loop with weights and inputs in bfloat16."""
    net, loader = _task(timer)
    half_inputs(net.to(torch.bfloat16))
    return plain_loop(timer, net, loader, sgd(net.parameters()))


def lightning(timer: CaseTimer, **options: Any) -> dict[str, float]:
    """Run the same training in a Trainer; the options are arguments of ``train``."""
    from benchmarks.training import Classifier, train

    net, loader = _task(timer)
    return train(timer, Classifier(net, sgd), loader, samples=len(loader.batches[0][1]), **options)


PEERS = {"accelerate": train_with_accelerate, "composer": train_with_composer, "apex": train_with_apex}


def peer(timer: CaseTimer, *, library: str, **options: Any) -> dict[str, float]:
    """Run the same training with another library."""
    net, loader = _task(timer)
    return PEERS[library](timer, net, loader, sgd(net.parameters()), **options)


MIXED, TRUE = "Lightning bf16-mixed", "Lightning bf16-true"
BY_HAND, AUTOCAST = "PyTorch O2 by hand, bf16", "PyTorch autocast bf16"
Rows = list[tuple[str, Any, dict[str, Any], tuple[str, ...]]]
# Kind -> rows: name, function, its arguments, and the cases to divide by in addition to Lightning in float32.
ROWS: dict[str, Rows] = {
    "torch": [
        ("Lightning 32-true", lightning, {}, ()),
        (MIXED, lightning, {"precision": "bf16-mixed"}, ()),
        (TRUE, lightning, {"precision": "bf16-true"}, ()),
        ("PyTorch float32", plain, {}, ()),
        (AUTOCAST, plain, {"dtype": "bf16"}, ()),
        (f"{AUTOCAST}, channels_last, fused", plain, {"dtype": "bf16", "channels_last": True, "fused": True}, ()),
        (BY_HAND, o2_by_hand, {}, ()),
        ("PyTorch bf16 throughout", plain_half, {}, ()),
    ],
    "ours": [
        ("O0", lightning, {"amp": {"opt_level": "O0"}}, ("PyTorch float32",)),
        ("O1, bf16", lightning, {"amp": {"opt_level": "O1", "dtype": "bf16"}}, ("O0", MIXED, AUTOCAST)),
        ("O2, bf16", lightning, {"amp": {"opt_level": "O2", "dtype": "bf16"}}, ("O0", MIXED, BY_HAND)),
        ("O3, bf16", lightning, {"amp": {"opt_level": "O3", "dtype": "bf16"}}, ("O0", TRUE)),
    ],
    "peer": [
        ("Accelerate bf16", peer, {"library": "accelerate"}, (MIXED,)),
        ("Composer fp32", peer, {"library": "composer", "precision": "fp32"}, ()),
        ("Composer amp_bf16", peer, {"library": "composer", "precision": "amp_bf16"}, (MIXED,)),
        ("apex O1", peer, {"library": "apex", "level": "O1"}, ()),
        ("apex O2", peer, {"library": "apex", "level": "O2"}, ()),
    ],
}
PACKAGES = {"accelerate": ("accelerate",), "composer": ("mosaicml",), "apex": ("apex",)}
SUITE = Suite(
    name="precision",
    about="A residual network on images of 32 x 32, with the same data and seed at every precision.",
    cases=[
        Case(
            name=name, run=run, config=config, against=against, kind=kind,
            needs=PACKAGES.get(config.get("library", ""), ()),
        )
        for kind, rows in ROWS.items()
        for name, run, config, against in rows
    ],
    aims=[
        Aim("O1, bf16", MIXED, 1.02),
        Aim("O2, bf16", BY_HAND, 1.05),
        Aim("O1, bf16", "O0", 1 / 1.5, fact="bfloat16_instructions"),
    ],
    quick=("Lightning 32-true", "O1, bf16"),
    steps=5,
    warmup=4,
    seconds=300,
)  # fmt: skip
