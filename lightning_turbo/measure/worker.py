"""The inside of a measured process: the pipe to the program that measures, in lines of JSON.

Orders come on standard input: first the task, then ``{"order": "round", ...}`` and ``{"order": "end"}``. Events go out
on what was standard output; whatever the code prints goes to standard error, which is kept as a log.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import textwrap
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from lightning_turbo.errors import MissingExtraError
from lightning_turbo.measure.ending import end_process
from lightning_turbo.measure.meter import Meter

__all__ = ["Channel", "SkippedError", "limit_memory", "open_channel", "peak_bytes", "serve"]

STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
LINE = 200  # characters of an error that a table shows; the log has the rest


class SkippedError(Exception):
    """Raised by what cannot be measured here; its text is the reason that the report shows."""


class Channel:
    """The two ends of the pipe.

    Args:
        orders: One JSON object a line.
        events: Where events go, one JSON object a line.
    """

    def __init__(self, orders: TextIO, events: TextIO) -> None:
        self.orders = orders
        self.events = events

    def tell(self, event: Mapping[str, Any]) -> None:
        """Send an event."""
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for an order; end the process if the program that measures is gone."""
        line = self.orders.readline()
        # The end of the pipe: nobody would ever read what goes on to be measured, and nothing of it is to be saved.
        if not line:
            end_process(1)
        return json.loads(line)

    def ask(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Send an event and wait for the order that follows it."""
        self.tell(event)
        return self.receive()


def open_channel() -> Channel:
    """Take over standard input and output of this process as the pipe; what is printed goes to standard error."""
    # The pipe moves to descriptors of its own, so that whatever the program prints cannot break a line of it.
    orders = os.fdopen(os.dup(0), "r")
    events = os.fdopen(os.dup(1), "w")
    # A program that reads its standard input finds the end of it, and takes no order from the pipe.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return Channel(orders, events)


def _plain(value: Any) -> Any:
    """A value as JSON knows it: numbers that are not finite become ``None``."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def serve(channel: Channel, meter: Meter, run: Callable[[], Mapping[str, Any]]) -> None:
    """Run what is measured, and report how it ended.

    Args:
        channel: To the program that measures.
        meter: Whose ``step`` is called by ``run``.
        run: Returns numbers by name, or lists and dicts of them. A ``SkippedError`` or ``MissingExtraError`` says that
            it cannot run here, any other error that it failed.
    """
    try:
        numbers = _plain(run())
        channel.tell({"event": "done", "numbers": numbers, "peak_bytes": peak_bytes(meter.device)})
    except (SkippedError, MissingExtraError) as error:
        channel.tell({"event": "skipped", "reason": str(error)})
    except Exception as error:
        traceback.print_exc()
        # The log has the traceback; a table has room for one line.
        first = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        channel.tell({"event": "failed", "reason": textwrap.shorten(first, LINE, placeholder=" ...")})


def _status(field: str) -> int | None:
    """One size of /proc/self/status in bytes, or ``None`` where the system has no such file."""
    return _field(STATUS, field)


def _field(path: Path, field: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def limit_memory(share: float) -> None:
    """Let this process take no more than a share of the memory that is free; beyond it, torch raises an error.

    On a CPU that is the size of its data, where the system tells: the kernel would not refuse memory, but kill.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(share * free / total)
    elif (data := _status("VmData")) is not None and (free := _free_bytes()) is not None:
        import resource  # POSIX only, as VmData is

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (data + int(share * free), hard))


def _free_bytes() -> int | None:
    """The memory that is available in the machine, and in the control group of a container."""
    free = [_field(MEMORY, "MemAvailable")]
    with contextlib.suppress(OSError, ValueError):  # no group, or one without a limit
        limit, taken = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        # Cached pages of files count as taken, and the kernel gives them up when memory is asked for.
        cached = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines()).get("inactive_file", 0)
        free.append(limit - taken + int(cached))
    return min((each for each in free if each is not None), default=None)


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest number of bytes in use so far.

    ``VmHWM`` is read on the CPU; ``ru_maxrss`` would start at the peak of the parent process.

    Returns:
        Bytes, or ``None`` on a CPU whose system has no ``/proc``.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")
