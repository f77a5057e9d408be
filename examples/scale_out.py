"""Computes what more GPUs bring: batch, accumulation, learning rate, bytes to add up, and how much of it shows.

    python -m examples.scale_out                              ResNet-50, up to 4,096 GPUs
    python -m examples.scale_out --parameters 46.2e6 --sample-ms 2 --batch 16      a network of your own
    python -m examples.scale_out --write docs/scale-out.md    renew the table there

Nothing is measured: it is arithmetic on the numbers that you give. Measure ``--sample-ms`` on one GPU.

The model: gradients become ready evenly over the backward pass, in buckets of ``--bucket-mib``; each bucket is added up
over all GPUs in a ring, ``2 (n - 1) / n`` of its bytes through the narrowest link plus the latency of a tree of that
many GPUs; buckets follow one another. What is not done when the backward pass ends lengthens the step.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_turbo.optim import lr_factor

__all__ = ["Plan", "Setup", "main", "plan", "stops_paying", "table"]

BEGIN, END = "<!-- table: made by examples/scale_out.py -->", "<!-- end of table -->"
GPUS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BACKWARD = 2 / 3  # share of a step's arithmetic: gradients of inputs and of weights, against one forward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the table is computed from; the defaults are ResNet-50 on machines of 8 A100.

    Args:
        parameters: Of the network.
        sample_ms: Forward and backward of one sample on one GPU, in milliseconds.
        batch: Samples that a GPU takes at a time.
        least: Samples a step for which the learning rate was chosen; fewer GPUs accumulate up to it.
        most: Samples a step beyond which the network does not train as well; more GPUs take smaller batches each.
        inside: Bytes a second from one GPU to the next in a machine.
        between: Bytes a second from a machine to the next, for each GPU's share of its network.
        latency: Seconds for one hop.
        machine: GPUs in a machine.
        bucket: Bytes of a bucket of gradients; DDP's own are 25 MiB.
    """

    parameters: float = 25.557e6
    sample_ms: float = 0.405
    batch: int = 64
    least: int = 256
    most: int = 32768
    inside: float = 230e9
    between: float = 22e9
    latency: float = 10e-6
    machine: int = 8
    bucket: float = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """One row: what a number of GPUs should do, and what comes of it."""

    gpus: int
    per_gpu: int
    """Samples that a GPU takes at a time."""
    accumulate: int
    """Batches of an optimizer step."""
    batch: int
    """Samples of an optimizer step."""
    sent: tuple[float, float]
    """Bytes that a GPU sends in a step, in float32 and in half precision."""
    hidden: tuple[float, float]
    """Share of the exchange that lies behind the backward pass."""
    efficiency: tuple[float, float]
    """Samples a second over those of as many separate GPUs."""


def plan(gpus: int, setup: Setup) -> Plan | None:
    """Return what a number of GPUs should do, or ``None`` where each would have less than a sample."""
    per_gpu = min(setup.batch, setup.most // gpus)
    if per_gpu < 1:
        return None
    accumulate = max(1, math.ceil(setup.least / (per_gpu * gpus)))
    compute = per_gpu * setup.sample_ms / 1000
    sent, hidden, efficiency = [], [], []
    for width in (4, 2):
        size = setup.parameters * width
        buckets = math.ceil(
            setup.parameters * 4 / setup.bucket
        )  # of float32; compression makes them smaller, not fewer
        exchange, exposed = _exchange(gpus, size, buckets, compute * BACKWARD, setup)
        sent.append(2 * (gpus - 1) / gpus * size)
        hidden.append(1 - exposed / exchange if exchange else 1.0)
        efficiency.append(accumulate * compute / (accumulate * compute + exposed))
    return Plan(
        gpus, per_gpu, accumulate, per_gpu * accumulate * gpus, tuple(sent), tuple(hidden), tuple(efficiency)
    )  # fmt: skip


def _exchange(gpus: int, size: float, buckets: int, backward: float, setup: Setup) -> tuple[float, float]:
    """Seconds of the whole exchange, and those that stick out behind the last backward pass of a step."""
    if gpus == 1:
        return 0.0, 0.0
    speed = setup.inside if gpus <= setup.machine else min(setup.inside, setup.between)
    each = 2 * (gpus - 1) / gpus * size / buckets / speed + 2 * math.log2(gpus) * setup.latency
    end = 0.0
    for bucket in range(1, buckets + 1):
        end = max(end, backward * bucket / buckets) + each
    return each * buckets, end - backward


def stops_paying(rows: Sequence[Plan], setup: Setup, gain: float = 1.5) -> int | None:
    """Return the first number of GPUs that is less than ``gain`` times as fast as the one half its size.

    Speed is samples a second with gradients in half precision. ``None`` if every doubling pays.
    """
    speeds = {row.gpus: row.gpus * row.efficiency[1] for row in rows}
    for gpus in speeds:
        if gpus // 2 in speeds and speeds[gpus] < gain * speeds[gpus // 2]:
            return gpus
    return None


def table(setup: Setup, gpus: Sequence[int] = GPUS) -> str:
    """Write the rows as Markdown."""
    rows = [row for row in (plan(n, setup) for n in gpus) if row is not None]
    head = (
        "GPUs", "batch a GPU", "accumulate", "batch a step", "rate: linear, sqrt", "sent a GPU and step",
        "hidden", "efficiency", "sent, half", "hidden, half", "efficiency, half",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "--:|" * len(head)]
    for row in rows:
        linear, root = (lr_factor(rule, row.batch, setup.least) for rule in ("linear", "sqrt"))
        cells = [f"{row.gpus:,}", row.per_gpu, row.accumulate, f"{row.batch:,}", f"x {linear:g}, x {root:.3g}"]
        for sent, hidden, efficiency in zip(row.sent, row.hidden, row.efficiency, strict=True):
            cells += [f"{sent / 1e6:.0f} MB", f"{hidden:.0%}" if sent else "-", f"{efficiency:.0%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    end = stops_paying(rows, setup)
    verdict = (
        f"From {end:,} GPUs on, twice as many are less than 1.5 times as fast."
        if end
        else "Up to here, twice as many GPUs are at least 1.5 times as fast."
    )
    left = [n for n in gpus if n > rows[-1].gpus]
    if left:
        verdict += f" {left[0]:,} GPUs would have less than a sample each."
    return "\n".join(lines) + f"\n\n{verdict}"


def updated(text: str, setup: Setup) -> str:
    """Return a page with the table in its place.

    Raises:
        ValueError: If it has no place for it.
    """
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"expected a page with the lines {BEGIN!r} and {END!r}, got one without. Add both lines.")
    return f"{before}{BEGIN}\n{table(setup)}\n{END}{after}"


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _whole(text: str) -> int:
    value = _above_zero(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text!r}")
    return int(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser("python -m examples.scale_out", description="What more GPUs bring, computed.")
    own = Setup()
    parser.add_argument("--parameters", type=_above_zero, default=own.parameters, help="of the network")
    parser.add_argument("--sample-ms", type=_above_zero, default=own.sample_ms, help="forward and backward of a sample")
    parser.add_argument("--batch", type=_whole, default=own.batch, help="samples that a GPU takes at a time")
    parser.add_argument("--least", type=_whole, default=own.least, help="batch that the learning rate is for")
    parser.add_argument("--most", type=_whole, default=own.most, help="largest batch that trains well")
    parser.add_argument("--inside-gb", type=_above_zero, default=own.inside / 1e9, help="GB/s a GPU in a machine")
    parser.add_argument("--between-gb", type=_above_zero, default=own.between / 1e9, help="GB/s a GPU between machines")
    parser.add_argument("--latency-us", type=_above_zero, default=own.latency * 1e6, help="microseconds a hop")
    parser.add_argument("--machine", type=_whole, default=own.machine, help="GPUs in a machine")
    parser.add_argument("--bucket-mib", type=_above_zero, default=own.bucket / 2**20, help="MiB of DDP's buckets")
    parser.add_argument("--gpus", type=_whole, nargs="+", default=list(GPUS), help="the rows")
    parser.add_argument("--write", type=Path, help="a page to write the table into, between its two marks")
    given = parser.parse_args(arguments)
    if given.least > given.most:
        parser.error(f"--least {given.least} is above --most {given.most}; expected least <= most")
    setup = Setup(
        parameters=given.parameters, sample_ms=given.sample_ms, batch=given.batch, least=given.least, most=given.most,
        inside=given.inside_gb * 1e9, between=given.between_gb * 1e9, latency=given.latency_us / 1e6,
        machine=given.machine, bucket=given.bucket_mib * 2**20,
    )  # fmt: skip
    if given.write is None:
        print(table(setup, sorted(given.gpus)))
        return 0
    try:
        given.write.write_text(updated(given.write.read_text(), setup))
    except (OSError, ValueError) as error:
        sys.exit(f"--write {str(given.write)!r}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
