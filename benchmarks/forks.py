"""Processes of cases that are forked from one which has imported torch and Lightning: they start at once."""

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
# The server makes none of CUDA's calls, after which a fork could make no more: if an import asks torch for devices, it
# asks the driver's library.
ASKS_THE_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Fork:
    """What ``Process`` uses of ``subprocess.Popen``, of a module in a fork of the server, which ends with this program.

    Args:
        arguments: Of the interpreter: its name, ``-m`` and a module with a function ``main``.
        stderr: Takes what it prints.
        cwd: Its working directory.
        env: All its variables.
        settings: Two pipes and a session of its own, which it has anyway.
    """

    def __init__(
        self, arguments: Sequence[str], *, stderr: IO[bytes], cwd: Path, env: Mapping[str, str], **settings: Any
    ) -> None:
        orders, tells = FORKS.Pipe(duplex=False)
        hears, events = FORKS.Pipe(duplex=False)
        self.stdin, self.stdout = os.fdopen(os.dup(tells.fileno()), "wb"), os.fdopen(os.dup(hears.fileno()), "rb")
        os.environ.update(ASKS_THE_DRIVER)
        self._process = FORKS.Process(
            target=_run, args=(arguments[-1], orders, events, stderr.name, str(cwd), dict(env))
        )
        self._process.start()
        for end in (orders, tells, hears, events):
            end.close()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or ``None`` before there is one."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit status."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked case", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it, if it is not at its end."""
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
    # What the case starts is started by the default method; a fork has its server's.
    multiprocessing.set_start_method(None, force=True)
    sys.argv[:] = [module]
    importlib.import_module(module).main()
