"""Memory format of 2D and 3D networks: set for the whole network, or chosen by a measurement."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_turbo._checks import check_functions, expect, is_number, is_whole
from lightning_turbo._pytree import tensors_in
from lightning_turbo._random import same_random_numbers

__all__ = ["FORMATS", "FormatTimes", "MemoryFormatName", "measure_memory_format", "set_memory_format"]

MemoryFormatName = Literal["contiguous", "channels_last"]
FORMATS: tuple[MemoryFormatName, ...] = ("contiguous", "channels_last")
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of the weights


def set_memory_format(module: nn.Module, memory_format: MemoryFormatName) -> int:
    """Put the weights of 2D and 3D layers into a memory format, in place.

    Weights of four dimensions take ``torch.channels_last``, of five ``torch.channels_last_3d``. Convolutions then
    give outputs of the same format, whatever that of their input. Values, names and shapes stay as they are.

    Args:
        module: Any module; on its device already or not. Do this before it is wrapped for several ranks.
        memory_format: ``"contiguous"`` or ``"channels_last"``.

    Returns:
        The number of weights of four or five dimensions.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If the format is neither.

    Example:
        >>> net = nn.Conv2d(3, 8, 3)
        >>> set_memory_format(net, "channels_last")
        1
        >>> net.weight.is_contiguous(memory_format=torch.channels_last)
        True
    """
    _check_module(module)
    expect(memory_format in FORMATS, "memory_format", memory_format, "'contiguous' or 'channels_last'")
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.ndim in LAST]
    for tensor in tensors:
        wanted = LAST[tensor.ndim] if memory_format == "channels_last" else torch.contiguous_format
        tensor.data = tensor.data.contiguous(memory_format=wanted)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.contiguous(memory_format=wanted)
    return len(tensors)


class FormatTimes(NamedTuple):
    """The faster format, and the seconds of a step in each."""

    best: MemoryFormatName
    seconds: dict[MemoryFormatName, float]


def measure_memory_format(
    module: nn.Module,
    inputs: Sequence[Any] | dict[str, Any],
    *,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    device: torch.device | str | int | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    rounds: int = 3,
    steps: int = 2,
    margin: float = 0.02,
) -> FormatTimes:
    """Time forward and backward of a network in both memory formats, and tell which is faster here.

    The rule of thumb, channels last for convolutions, fails in 3D and on some devices; the measurement takes a few
    steps. It runs on a deep copy: weights, gradients, buffers and random numbers of the module stay as they are.

    Args:
        module: The network.
        inputs: Positional inputs of a real size, or a dictionary of named ones, on the device where it is measured.
        step: ``(network, inputs) -> loss`` or any tensor; ``None`` runs the network on the inputs and sums what
            floating-point tensors it returns.
        device: Where to measure, for example ``"cpu"``; ``None`` is where the network is.
        context: Makes the context of each forward pass, for example one of ``torch.autocast``.
        rounds: How often the two formats take turns, at least 1; the median counts.
        steps: Steps of each turn, at least 1.
        margin: By what share of its time channels last has to win to be taken, not negative.

    Returns:
        The faster format, and the seconds per step of each.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, the device is unknown, or the network has no weights of four or five
            dimensions.

    Note:
        Holds a second copy of the network for the time of the measurement, and synchronises the device once a turn.

    Example:
        >>> found = measure_memory_format(nn.Conv2d(3, 4, 3), [torch.rand(2, 3, 8, 8)])
        >>> found.best in found.seconds
        True
    """
    check_functions(step=step, context=context)
    _check_network(module)
    known = step is not None or isinstance(inputs, (tuple, list, dict))
    expect(known, "inputs", type(inputs), "a tuple of positional inputs or a dictionary of named ones", TypeError)
    for name, value in (("rounds", rounds), ("steps", steps)):
        expect(is_whole(value, 1), name, value, "a whole number of at least 1")
    expect(is_number(margin) and 0 <= margin < 1, "margin", margin, "a share from 0 to below 1, for example 0.02")
    device, step = _device(module, device), step or _sum_of_outputs
    with same_random_numbers([device] if device.type == "cuda" else []), torch.enable_grad():
        network = copy.deepcopy(module).to(device)
        seconds = _time_formats(network, lambda: _run(network, inputs, step, context), device, rounds, steps)
    wins = seconds["channels_last"] < (1 - margin) * seconds["contiguous"]
    return FormatTimes("channels_last" if wins else "contiguous", seconds)


def _time_formats(
    network: nn.Module, run: Callable[[], None], device: torch.device, rounds: int, steps: int
) -> dict[MemoryFormatName, float]:
    """Return the median seconds of a step in each format, which take turns so that a busy machine favours neither."""
    turns: dict[MemoryFormatName, list[float]] = {name: [] for name in FORMATS}
    for _ in range(rounds + 1):  # the first turn warms up
        for name, seconds in turns.items():
            set_memory_format(network, name)
            run()
            seconds.append(_time(run, device, steps) / steps)
    return {name: statistics.median(seconds[1:]) for name, seconds in turns.items()}


def _time(run: Callable[[], None], device: torch.device, steps: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        run()
    _wait(device)
    return time.perf_counter() - start


def _device(module: nn.Module, device: Any) -> torch.device:
    try:
        return torch.device(next(module.parameters()).device if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {device!r}.") from error


def _check_module(module: Any) -> None:
    expect(isinstance(module, nn.Module), "module", module, "a torch.nn.Module", TypeError)


def _check_network(module: Any) -> None:
    _check_module(module)
    layers = any(parameter.ndim in LAST for parameter in module.parameters())
    expect(layers, "module", type(module).__name__, "a network with 2D or 3D layers")


def _run(network: nn.Module, inputs: Any, step: Callable[..., Tensor], context: Callable[..., Any]) -> None:
    with context():
        loss = step(network, inputs)
    if loss.requires_grad:
        loss.sum().backward()
    network.zero_grad(set_to_none=True)


def _sum_of_outputs(network: nn.Module, inputs: Any) -> Tensor:
    output = network(**inputs) if isinstance(inputs, dict) else network(*inputs)
    sums = [tensor.float().sum() for tensor in tensors_in(output) if tensor.is_floating_point()]
    return torch.stack([each.to(sums[0].device) for each in sums]).sum() if sums else torch.zeros(())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
