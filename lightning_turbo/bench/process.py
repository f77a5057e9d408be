"""One case in a process of its own, as the runner sees it: started, asked, held still, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["CaseFailedError", "CaseProcess"]

# The worker leaves the terminal's process group before it imports anything slow.
START = "import os; os.setpgrp(); from lightning_turbo.bench.worker import main; main()"
# The guard is told by the end of its input that the runner closed the case, or died in whatever way.
GUARD = """
import os, signal, sys
sys.stdin.buffer.read()
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""


class CaseFailedError(Exception):
    """The process of a case died or did not answer in time; the text says which."""


class CaseProcess:
    """A worker process with the pipe to it.

    The worker is in a process group of its own, together with whatever it starts: Ctrl-C in the terminal does not
    reach it, and the whole group can be held still. A small second process, the guard, kills the group when the runner
    closes the case or dies, be it by SIGKILL while the group is held.

    Args:
        task: The first order, see ``worker.serve``.
        log: File that takes what the case prints.
        folder: Working directory of the worker.
        environment: Variables set on top of this process's own.
    """

    def __init__(self, task: Mapping[str, Any], log: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._held = False
        self._buffer = b""
        paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths, **environment},
            )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self.tell(dict(task))

    def tell(self, order: dict[str, Any]) -> None:
        """Send an order, waking the case if it is held.

        Raises:
            CaseFailedError: If the process is gone.
        """
        self.resume()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise CaseFailedError(self._obituary()) from None

    def listen(self, timeout: float, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the next event.

        Args:
            timeout: Seconds after which the case counts as hung.
            check: Called about five times a second; what it raises ends the waiting.

        Raises:
            CaseFailedError: If the process ends or hangs first.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            check()
            if time.monotonic() > deadline:
                raise CaseFailedError(f"no answer within {timeout:.0f} s")
            if select.select([self._process.stdout], [], [], 0.2)[0]:
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise CaseFailedError(self._obituary())
                self._buffer += chunk
            elif self._process.poll() is not None:
                raise CaseFailedError(self._obituary())
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def hold(self) -> None:
        """Stop every thread and process of the case until ``resume``."""
        if not self._held and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGSTOP)
            self._held = True

    def resume(self) -> None:
        """Let a held case run again."""
        if self._held:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGCONT)
            self._held = False

    def close(self, grace: float = 5.0) -> None:
        """End the process and all that it started.

        Args:
            grace: Seconds that the process is given to end by itself.
        """
        self.resume()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._guard.stdin.close()
            self._guard.wait()
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _obituary(self) -> str:
        """How the process ended, with the last line that it left in its log."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe without a result"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1]}" if lines else how
