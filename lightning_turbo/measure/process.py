"""A measured process, as seen by the controlling program: start, send orders, hold, end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CAN_HOLD", "Process", "ProcessError"]

CAN_HOLD = hasattr(os, "killpg") and hasattr(signal, "SIGSTOP")  # not on Windows

# The end of its input tells the guard that the process was closed or that the controlling program died.
GUARD = """
import os, signal, sys
sys.stdin.buffer.read()
try:
    getattr(os, "killpg", os.kill)(int(sys.argv[1]), getattr(signal, "SIGKILL", signal.SIGTERM))
except OSError:
    pass
"""


class ProcessError(Exception):
    """The process died or did not answer in time; the message says which."""


class Process:
    """A fresh Python process and a pipe to it, with one JSON object per line in each direction.

    The process has its own session, together with everything it starts: Ctrl-C in the terminal does not reach it, and
    all of it can be held. A small second process, the guard, kills the session when it is closed or when the
    controlling program dies, even by SIGKILL while the process is held. The process starts with this object and ends
    with ``close``, which the owner always calls.

    Args:
        arguments: Arguments of the Python interpreter, such as ``["-m", "package.worker"]``.
        task: The first order.
        log: File for the output of the process.
        folder: Its working directory.
        environment: Variables to set in addition to this process's environment.
        popen: Starts it; takes the arguments of ``subprocess.Popen``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        task: Mapping[str, Any],
        *,
        log: Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self.log = log
        self._lines = queue.SimpleQueue[bytes]()
        # The process runs in another folder, where relative entries (including the empty one) would mean other places.
        paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # does the same on Windows
            )
        # Windows supports timeouts for sockets but not for pipes, so a thread reads the pipe.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # Isolated (-I, -S): it imports nothing of the project and starts in milliseconds.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        # If the process has already ended, ``listen`` reports how. The owner needs the object to close pipes and guard.
        with contextlib.suppress(ProcessError):
            self.tell(task)

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send an order; wake the process if it is held.

        Raises:
            ProcessError: If the process is gone.
        """
        self.resume()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ProcessError(self._obituary()) from None

    def listen(self, timeout: float, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the next event.

        Args:
            timeout: Seconds after which the process counts as hung.
            check: Called about five times per second; an exception that it raises ends the wait.

        Raises:
            ProcessError: If the process ends or hangs first.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Checked here too, so that an interruption is noticed while the process is silent.
            check()
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                break
            if time.monotonic() > deadline:
                raise ProcessError(f"no answer within {timeout:.0f} s")
            # Processes that it started may keep the pipe open after its end.
            if self._process.poll() is not None:
                raise ProcessError(self._obituary())
        if not line.endswith(b"\n"):  # the pipe ended, possibly inside a line
            raise ProcessError(self._obituary())
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")

    def hold(self) -> None:
        """Stop all its threads and processes until ``resume``; no effect without ``CAN_HOLD``."""
        self._signal("SIGSTOP")

    def resume(self) -> None:
        """Continue the process if it is held."""
        self._signal("SIGCONT")

    def _signal(self, name: str) -> None:
        # A process that has ended cannot be held; ``listen`` reports how it ended. Until it is waited for, macOS
        # reports that the signal is not permitted.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if CAN_HOLD:
                os.killpg(self._process.pid, getattr(signal, name))

    def close(self, grace: float = 5.0) -> None:
        """End the process and everything that it started.

        Args:
            grace: Seconds in which the process may exit by itself.
        """
        # First, because a held process would not see the end of its input.
        self.resume()
        process = self._process
        guard = self._guard
        assert process.stdin is not None
        assert guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        finally:
            # The guard kills the whole session, even if the process has ended before its children.
            guard.stdin.close()
            guard.wait()
            process.kill()
            process.wait()
            self._reader.join(5.0)

    def _obituary(self) -> str:
        """Return how the process ended, with the last line of its log."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe without a result"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1]}" if lines else how
