"""Memory format of 2D and 3D networks: a setter for the whole network, and a measurement."""

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
STEPS = 2  # of each turn in a measurement
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of the weight


def set_memory_format(module: nn.Module, memory_format: MemoryFormatName) -> int:
    """Convert the weights of 2D and 3D layers to a memory format, in place.

    ``"channels_last"`` converts weights of four dimensions to ``torch.channels_last``, of five to
    ``torch.channels_last_3d``. A convolution then returns the format of its weight for any format of its input. Values,
    names and shapes do not change.

    Args:
        module: Any module, on any device. Call this before DDP wraps it.
        memory_format: ``"contiguous"`` or ``"channels_last"``.

    Returns:
        The number of weights of four or five dimensions.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If the format is another one.

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
        _convert(tensor, LAST[tensor.ndim] if memory_format == "channels_last" else torch.contiguous_format)
    return len(tensors)


def _convert(tensor: Tensor, memory_format: torch.memory_format) -> None:
    tensor.data = tensor.data.contiguous(memory_format=memory_format)
    if tensor.grad is not None:
        tensor.grad = tensor.grad.contiguous(memory_format=memory_format)


def has_format(module: nn.Module) -> bool:
    """Return whether a module has weights of four or five dimensions."""
    return any(parameter.ndim in LAST for parameter in module.parameters())


class FormatTimes(NamedTuple):
    """Faster format, and the seconds of a step in each format."""

    best: MemoryFormatName
    seconds: dict[MemoryFormatName, float]


def measure_memory_format(
    module: nn.Module,
    inputs: Sequence[Any] | dict[str, Any],
    *,
    device: torch.device | str | int | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    rounds: int = 3,
    margin: float = 0.02,
) -> FormatTimes:
    """Measure forward and backward of a network in both memory formats, and return the faster format.

    The usual advice, channels last for convolutions, fails in 3D and on some devices. The measurement takes a few steps
    on a deep copy: weights, gradients and buffers of the module, and the global RNG, do not change. The loss of a step
    is the sum of the floating-point tensors that the network returns.

    Args:
        module: The network.
        inputs: Positional inputs as a list, or named inputs as a dictionary, of the size used in training and on the
            device of the measurement.
        device: Device of the measurement, for example ``"cpu"``. Default: the device of the network.
        context: Function that returns the context of a forward pass, for example one of ``torch.autocast``.
        rounds: Number of turns of each format, at least 1. The result is the median.
        margin: Share of the time that channels last has to save to be chosen, at least 0 and below 1.

    Returns:
        The faster format, and the seconds per step in each format.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, the device is unknown, or the network has no weights of four or five
            dimensions.

    Note:
        The measurement needs memory for a second copy of the network, and synchronises the device twice per turn.

    Example:
        >>> found = measure_memory_format(nn.Conv2d(3, 4, 3), [torch.rand(2, 3, 8, 8)])
        >>> found.best in found.seconds
        True
    """
    check_functions(context=context)
    _check_network(module)
    valid = isinstance(inputs, (tuple, list, dict))
    expect(valid, "inputs", type(inputs), "a tuple of positional inputs or a dictionary of named ones", TypeError)
    expect(is_whole(rounds, 1), "rounds", rounds, "a whole number of at least 1")
    expect(is_number(margin) and 0 <= margin < 1, "margin", margin, "a number of at least 0 and below 1")
    device = _find_device(module, device)
    with same_random_numbers([device] if device.type == "cuda" else []), torch.enable_grad():
        network = copy.deepcopy(module).to(device)
        seconds = _time_formats(network, lambda: _run(network, inputs, context), device, rounds)
    wins = seconds["channels_last"] < (1 - margin) * seconds["contiguous"]
    return FormatTimes("channels_last" if wins else "contiguous", seconds)


def _time_formats(
    network: nn.Module, run: Callable[[], None], device: torch.device, rounds: int
) -> dict[MemoryFormatName, float]:
    """Return the median seconds of a step in each format. They take turns, so that a busy machine slows both."""
    turns: dict[MemoryFormatName, list[float]] = {name: [] for name in FORMATS}
    for _ in range(rounds + 1):  # the first one warms up
        for name, seconds in turns.items():
            set_memory_format(network, name)
            run()
            seconds.append(_time(run, device))
    return {name: statistics.median(seconds[1:]) for name, seconds in turns.items()}


def _time(run: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        run()
    _wait(device)
    return (time.perf_counter() - start) / STEPS


def _find_device(module: nn.Module, device: Any) -> torch.device:
    try:
        return torch.device(next(module.parameters()).device if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {device!r}.") from error


def _check_module(module: Any) -> None:
    expect(isinstance(module, nn.Module), "module", module, "a torch.nn.Module", TypeError)


def _check_network(module: Any) -> None:
    _check_module(module)
    expect(has_format(module), "module", type(module).__name__, "a network with 2D or 3D layers")


def _run(network: nn.Module, inputs: Any, context: Callable[..., Any]) -> None:
    with context():
        output = network(**inputs) if isinstance(inputs, dict) else network(*inputs)
        loss = torch.zeros(())
        for tensor in filter(Tensor.is_floating_point, tensors_in(output)):
            loss = loss.to(tensor.device) + tensor.float().sum()
    if loss.requires_grad:
        loss.backward()
    network.zero_grad(set_to_none=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
