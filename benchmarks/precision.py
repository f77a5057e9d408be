"""The suite ``precision``: O0-O3 beside Lightning's own precisions, plain PyTorch loops, and peers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.meter import Meter
from benchmarks.peers import train_with_accelerate, train_with_apex, train_with_composer
from benchmarks.suite import Aim, Suite
from benchmarks.workloads import DTYPES, Endless, conv_net, image_batches, plain_loop, resnet50, sgd

__all__ = ["SUITE"]

SUITE = Suite(
    "precision",
    "One network, data and seed at every precision: a residual network at 32 x 32 on a CPU, ResNet-50 on a GPU.",
    steps=5,
    quick_steps=1,
    rounds=15,
    warmup=4,
    lead=1,
    seconds=300,
    quick_seconds=8,
)


def _task(meter: Meter, dims: int = 2) -> tuple[nn.Module, Endless, int]:
    """Network, batches and batch size for the meter's device."""
    if dims == 3:
        batch, classes, shape = 64, 11, (1, 28, 28, 28)
        net = resnet50(3, classes)
    elif meter.device.type == "cuda":
        batch, classes, shape = 128, 1000, (3, 224, 224)
        net = resnet50(2, classes)
    else:
        batch, classes, shape = 32, 10, (3, 32, 32)
        net = conv_net(classes, width=16 if meter.quick else 32)
    return net.to(meter.device), Endless(image_batches(meter, shape, classes, batch)), batch


def _channels_last(net: nn.Module, loader: Endless, dims: int) -> None:
    """Put weights and batches into the channels-last format."""
    memory_format = torch.channels_last if dims == 2 else torch.channels_last_3d
    net.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]
    loader.batches = [(x.to(memory_format=memory_format), y) for x, y in loader.batches]


def plain(
    meter: Meter, *, dtype: str = "", dims: int = 2, channels_last: bool = False, fused: bool = False
) -> dict[str, float]:
    """A plain loop, in float32 or under autocast."""
    net, loader, _ = _task(meter, dims)
    if channels_last:
        _channels_last(net, loader, dims)
    optimizer = sgd(list(net.parameters()), fused=fused)
    if not dtype:
        return plain_loop(meter, net, loader, optimizer)
    scaler = torch.amp.GradScaler(meter.device.type) if dtype == "fp16" else None
    return plain_loop(
        meter,
        net,
        loader,
        optimizer,
        forward=lambda: torch.autocast(meter.device.type, DTYPES[dtype]),
        scaler=scaler,
    )


def plain_o2(meter: Meter, *, dims: int = 2) -> dict[str, float]:
    """O2 written by hand in bfloat16: half weights, float32 batch norm and masters, foreach copies."""
    net, loader, _ = _task(meter, dims)
    masters: list[Tensor] = [parameter.detach().clone() for parameter in net.parameters()]
    net.to(torch.bfloat16)
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.float()
    weights: list[Tensor] = list(net.parameters())
    optimizer = sgd(masters)

    for master in masters:
        master.grad = torch.zeros_like(master)
    gradients = [master.grad for master in masters if master.grad is not None]

    def hand_over() -> None:
        torch._foreach_copy_(gradients, [weight.grad for weight in weights if weight.grad is not None])
        for weight in weights:
            weight.grad = None

    @torch.no_grad()
    def bring_back() -> None:
        torch._foreach_copy_(weights, masters)

    return plain_loop(
        meter,
        net,
        loader,
        optimizer,
        input_dtype=torch.bfloat16,
        before_step=hand_over,
        after_step=bring_back,
        clear=lambda: None,  # hand_over has taken the weights' gradients and overwrites the masters'
    )


def plain_half(meter: Meter, *, dims: int = 2) -> dict[str, float]:
    """A plain loop in bfloat16 throughout."""
    net, loader, _ = _task(meter, dims)
    net.to(torch.bfloat16)
    return plain_loop(meter, net, loader, sgd(list(net.parameters())), input_dtype=torch.bfloat16)


def lightning(
    meter: Meter, *, dims: int = 2, amp: dict[str, Any] | None = None, fused: bool = False, **trainer: Any
) -> dict[str, float]:
    """The same training under a Trainer."""
    from benchmarks.training import QUIET, Classifier, apex_amp, train

    net, loader, batch = _task(meter, dims)
    if amp is not None:
        trainer["plugins"] = [apex_amp(**amp)]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd(list(parameters), fused=fused)

    return train(meter, Classifier(net, optimizer), loader, samples=batch, **QUIET, **trainer)


def accelerate(meter: Meter, *, dims: int = 2) -> dict[str, float]:
    """Hugging Face Accelerate in bfloat16."""
    net, loader, _ = _task(meter, dims)
    return train_with_accelerate(meter, net, loader, sgd(list(net.parameters())))


def composer(meter: Meter, *, dims: int = 2, precision: str) -> dict[str, float]:
    """MosaicML Composer."""
    net, loader, _ = _task(meter, dims)
    return train_with_composer(meter, net, loader, sgd(list(net.parameters())), precision)


def apex(meter: Meter, *, dims: int = 2, level: str = "O1") -> dict[str, float]:
    """The real apex, in float16."""
    net, loader, _ = _task(meter, dims)
    return train_with_apex(meter, net, loader, sgd(list(net.parameters())), level)


def register(suite: Suite, dims: int, devices: tuple[str, ...]) -> None:
    """Add the cases of one network and their aims.

    Args:
        suite: Where to.
        dims: 2 for images, 3 for volumes; the names in 3D begin with ``3D``.
        devices: Where they run.
    """
    mark = "3D: " if dims == 3 else ""
    both: dict[str, Any] = {"devices": devices, "base": f"{mark}Lightning 32-true"}
    gpu: dict[str, Any] = {**both, "devices": ("cuda",)}

    def add(name: str, run: Any, *, against: tuple[str, ...] = (), **options: Any) -> None:
        config = {**({"dims": 3} if dims == 3 else {}), **options.pop("config", {})}
        quick = dims == 2 and name in ("Lightning 32-true", "O1, bf16")
        others = tuple(mark + other for other in against)
        suite.add(mark + name, run, config=config, against=others, quick=quick, **options)

    add("Lightning 32-true", lightning, baseline=dims == 2, **both)
    for precision in ("bf16-mixed", "bf16-true"):
        add(f"Lightning {precision}", lightning, config={"precision": precision}, **both)
    for precision in ("16-mixed", "16-true"):
        add(f"Lightning {precision}", lightning, config={"precision": precision}, **gpu)

    def ours(name: str, level: str, against: tuple[str, ...], options: dict[str, Any], **amp: str) -> None:
        add(name, lightning, config={"amp": {"opt_level": level, **amp}}, against=against, ours=True, **options)

    ours("O0", "O0", ("PyTorch float32",), both)
    for dtype, options in (("bf16", both), ("fp16", gpu)):
        stock = {"bf16": "Lightning bf16-mixed", "fp16": "Lightning 16-mixed"}[dtype]
        by_hand = ("PyTorch O2 by hand, bf16",) if dtype == "bf16" else ()
        throughout = {"bf16": "Lightning bf16-true", "fp16": "Lightning 16-true"}[dtype]
        ours(f"O1, {dtype}", "O1", ("O0", stock, f"PyTorch autocast {dtype}"), options, dtype=dtype)
        ours(f"O2, {dtype}", "O2", ("O0", stock, *by_hand), options, dtype=dtype)
        ours(f"O3, {dtype}", "O3", ("O0", throughout), options, dtype=dtype)

    add("PyTorch float32", plain, **both)
    add("PyTorch autocast bf16", plain, config={"dtype": "bf16"}, **both)
    best = {"dtype": "bf16", "channels_last": True, "fused": True}
    add("PyTorch autocast bf16, channels_last, fused", plain, config=best, **both)
    add("PyTorch autocast fp16", plain, config={"dtype": "fp16"}, **gpu)
    add("PyTorch O2 by hand, bf16", plain_o2, **both)
    add("PyTorch bf16 throughout", plain_half, **both)

    peer: dict[str, Any] = {"peer": True, "against": ("Lightning bf16-mixed",)}
    add("Accelerate bf16", accelerate, needs=("accelerate",), **peer, **both)
    add("Composer fp32", composer, config={"precision": "fp32"}, needs=("mosaicml",), peer=True, **both)
    add("Composer amp_bf16", composer, config={"precision": "amp_bf16"}, needs=("mosaicml",), **peer, **gpu)
    for level in ("O1", "O2"):
        add(f"apex {level}", apex, config={"level": level}, needs=("apex",), peer=True, **gpu)

    def aim(case: str, against: str, at_most: float, **options: Any) -> None:
        suite.aims.append(Aim(mark + case, mark + against, at_most, **{"devices": devices, **options}))

    aim("O1, bf16", "Lightning bf16-mixed", 1.02)
    aim("O2, bf16", "PyTorch O2 by hand, bf16", 1.05)
    aim("O1, bf16", "PyTorch autocast bf16", 1.03, devices=("cuda",))
    aim("O2, bf16", "Lightning 32-true", 0.6, quantity="peak_bytes", devices=("cuda",))
    if dims == 2:
        suite.aims.append(Aim("O1, bf16", "O0", 1 / 1.5, devices=("cpu",), fact="bfloat16_instructions"))


register(SUITE, 2, ("cpu", "cuda"))
register(SUITE, 3, ("cuda",))
