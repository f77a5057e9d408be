"""The inside of a measured process: a pipe to the controlling program, with lines of JSON.

Orders arrive on standard input: first the task, then ``{"order": "round", ...}`` and ``{"order": "end"}``. Events are
sent on the original standard output; whatever the code prints goes to standard error, which is kept as a log.
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
from lightning_turbo.measure.round_timer import RoundTimer

__all__ = ["Channel", "SkippedError", "open_channel", "peak_bytes", "serve"]

STATUS = Path("/proc/self/status")
LINE = 200  # characters of an error shown in a table; the log has the rest


class SkippedError(Exception):
    """Something cannot be measured here; the message is the reason that the report shows."""


class Channel:
    """Both ends of the pipe.

    Args:
        orders: One JSON object per line.
        events: Where events go, one JSON object per line.
    """

    def __init__(self, orders: TextIO, events: TextIO) -> None:
        self.orders = orders
        self.events = events

    def tell(self, event: Mapping[str, Any]) -> None:
        """Send an event."""
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for an order; end the process if the controlling program is gone."""
        line = self.orders.readline()
        # The pipe has ended: nobody would read further results, and nothing may be saved.
        if not line:
            end_process(1)
        return json.loads(line)

    def ask(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Send an event and wait for the next order."""
        self.tell(event)
        return self.receive()


def open_channel() -> Channel:
    """Use standard input and output of this process as the pipe; printed output goes to standard error."""
    # The pipe gets its own descriptors, so that output of the program cannot corrupt it.
    orders = os.fdopen(os.dup(0), "r")
    events = os.fdopen(os.dup(1), "w")
    # A program that reads standard input gets end-of-file and no orders.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return Channel(orders, events)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types: non-finite numbers become ``None``."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def serve(channel: Channel, timer: RoundTimer, run: Callable[[], Mapping[str, Any]]) -> None:
    """Run the measured code, and report how it ended.

    Args:
        channel: The channel to the controlling program.
        timer: The timer whose ``step`` is called by ``run``.
        run: Returns numbers by name, or lists and dicts of them. A ``SkippedError`` or ``MissingExtraError`` means that
            it cannot run here, any other exception that it failed.
    """
    try:
        numbers = _plain(run())
        channel.tell({"event": "done", "numbers": numbers, "peak_bytes": peak_bytes(timer.device)})
    except (SkippedError, MissingExtraError) as error:
        channel.tell({"event": "skipped", "reason": str(error)})
    except Exception as error:
        traceback.print_exc()
        # The log has the traceback; a table has room for one line.
        first = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        channel.tell({"event": "failed", "reason": textwrap.shorten(first, LINE, placeholder=" ...")})


def _status(field: str) -> int | None:
    """Return one size from /proc/self/status in bytes, or ``None`` if the file does not exist."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest number of bytes in use so far.

    On the CPU it reads ``VmHWM``, because ``ru_maxrss`` would start at the parent's peak.

    Returns:
        Bytes, or ``None`` on a CPU whose system has no ``/proc``.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")
