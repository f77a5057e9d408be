"""``Fork``: a case's process, forked from a server that has imported torch and Lightning, so that it starts at once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

__all__ = ["Fork"]

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_turbo", "benchmarks.worker", "benchmarks.gpu"])
# CUDA cannot be used in a fork of a process that has initialized it. With this variable, imports that ask torch whether
# there is a GPU query NVML, which does not initialize CUDA.
QUERY_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Fork:
    """Runs a module in a fork of the server; has what ``Process`` uses of the interface of ``subprocess.Popen``.

    The fork starts with this object and ends with ``main`` of the module, or with ``kill``. The server starts with the
    first fork and ends with this program.

    Args:
        arguments: Name of the interpreter, ``-m``, and the name of a module with a function ``main``.
        stderr: File for the standard error of the fork.
        cwd: Working directory.
        env: All environment variables.
        settings: Ignored: the fork always has two pipes and its own session.
    """

    def __init__(
        self, arguments: Sequence[str], *, stderr: IO[bytes], cwd: Path, env: Mapping[str, str], **settings: Any
    ) -> None:
        orders, order_writer = FORKS.Pipe(duplex=False)
        event_reader, events = FORKS.Pipe(duplex=False)
        self.stdin = os.fdopen(os.dup(order_writer.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(event_reader.fileno()), "rb")
        os.environ.update(QUERY_NVML)
        self._process = FORKS.Process(
            target=_run, args=(arguments[-1], orders, events, stderr.name, str(cwd), dict(env))
        )
        self._process.start()
        for end in (orders, order_writer, event_reader, events):
            end.close()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or ``None`` while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit status."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked case", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()


def _run(
    module: str, orders: Connection, events: Connection, log: str, folder: str, environment: dict[str, str]
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as errors:
        for number, file in enumerate((orders, events, errors)):
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    # Processes that the case starts use the default start method. A fork would inherit that of the server.
    multiprocessing.set_start_method(None, force=True)
    sys.argv[:] = [module]
    importlib.import_module(module).main()
