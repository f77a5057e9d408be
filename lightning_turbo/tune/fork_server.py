"""Starts processes with torch and Lightning already imported, as forks of a process that did nothing else."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from lightning_turbo.errors import TurboError

__all__ = ["CAN_FORK", "ForkServer", "ForkedProcess", "main"]

CAN_FORK = sys.platform == "linux"  # libraries of macOS do not survive a fork, and Windows has none
MESSAGE = 4096  # bytes, of an order or an answer
SECONDS = 300.0  # the server counts as hung after this time
UNKNOWN = 255  # the exit status of a process if the server can no longer tell it


class ForkServer:
    """A process that imports modules and then only forks: each ``popen`` starts a copy of it.

    Importing torch and Lightning takes several seconds; a copy has them at once. The ``forkserver`` of
    ``multiprocessing`` is not enough: a process has only one, with one environment, while variables such as
    OMP_NUM_THREADS must be set before torch is imported; and it runs a pickled function, without pipes for standard
    input and output.

    The ``ScriptRunner`` starts one for each environment of its processes. It ends with ``close``, or at the end of its
    socket if the runner dies. It runs no code of the script, computes nothing and touches no device, so copies inherit
    the state after the imports and nothing else.

    Args:
        modules: Names of the modules to import.
        log: File for the output of the imports.
        folder: Working directory of the server and its copies.
        environment: All environment variables, as in the copies.
    """

    def __init__(self, modules: Sequence[str], *, log: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._numbers = itertools.count()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(SECONDS)
        with theirs, log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd=folder,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def popen(self, command: Sequence[str], *, stderr: IO[bytes], **options: Any) -> ForkedProcess:
        """Start a copy with its own session, and pipes for standard input and output.

        Args:
            command: ``python -m`` and a module whose ``main`` the copy calls.
            stderr: File for its output.
            options: Other arguments of ``subprocess.Popen``; ignored, because the copy has those of the server.

        Raises:
            TurboError: If the server has died, or cannot fork.
        """
        ours, theirs = [], []
        for mine in (1, 0):  # the ends of the pipes for standard input and output
            pipe = os.pipe()
            ours.append(pipe[mine])
            theirs.append(pipe[1 - mine])
        try:
            answer = self.ask({"start": command[-1]}, [*theirs, stderr.fileno()])
        finally:
            for each in theirs:
                os.close(each)
        stdin = os.fdopen(ours[0], "wb")
        stdout = os.fdopen(ours[1], "rb")
        if "pid" not in answer:
            stdin.close()
            stdout.close()
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise TurboError(f"no process could be started: {answer.get('error') or ''.join(lines[-1:])}")
        return ForkedProcess(self, answer["pid"], stdin, stdout)

    def ask(self, order: Mapping[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        """Send an order and return the answer, or an empty dict if the server has died."""
        number = next(self._numbers)
        try:
            socket.send_fds(self._orders, [json.dumps({"number": number, **order}).encode()], files)
            while message := self._orders.recv(MESSAGE):
                answer = json.loads(message)
                # After Ctrl-C, the answer to an earlier order may still be in the socket.
                if answer["number"] == number:
                    return answer
        except OSError:
            pass
        return {}

    def close(self) -> None:
        """End the server; its copies keep running."""
        self._orders.close()
        self._process.wait()


class ForkedProcess:
    """A copy of a ``ForkServer``, with the part of the ``subprocess.Popen`` interface that ``measure.Process`` needs.

    ``ForkServer.popen`` starts it; it ends by itself or through ``kill``. It is a child of the server, which reports
    its exit status, so wait for it before closing the server.
    """

    def __init__(self, server: ForkServer, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or ``None`` while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid}).get("status", UNKNOWN)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: If it still runs after this many seconds.
        """
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    """Import the modules named on the command line, and fork until the runner closes the socket."""
    number, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    sys.stdout.flush()  # otherwise each copy would print it again
    with socket.socket(fileno=int(number)) as orders:
        _serve(orders)


def _serve(orders: socket.socket) -> None:
    """Answer orders until the runner closes the socket."""
    while True:
        message, files, _, _ = socket.recv_fds(orders, MESSAGE, 3)
        if not message:
            return
        order = json.loads(message)
        if "poll" in order:
            _answer(orders, order, status=_status_of(order["poll"]))
        else:
            _start(orders, order, files)


def _status_of(pid: int) -> int | None:
    """Return the exit status of a copy, or ``None`` while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # Ctrl-C interrupted the runner before it read an earlier answer
        return UNKNOWN
    return os.waitstatus_to_exitcode(status) if ended else None


def _start(orders: socket.socket, order: Mapping[str, Any], files: Sequence[int]) -> None:
    """Fork; the copy answers."""
    try:
        pid = _fork()
    except OSError as error:
        _answer(orders, order, error=str(error))
        pid = -1
    if pid == 0:
        _run_copy(orders, order, files)
    for file in files:
        os.close(file)


def _run_copy(orders: socket.socket, order: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Answer from a session of its own, with these files as standard input, output and error, and run the module."""
    os.setsid()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    _answer(orders, order, pid=os.getpid())
    orders.close()
    sys.argv = sys.argv[:1]
    importlib.import_module(order["start"]).main()
    sys.exit()


def _answer(orders: socket.socket, order: Mapping[str, Any], **found: Any) -> None:
    orders.send(json.dumps({"number": order["number"], **found}).encode())


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns about threads. These belong to a BLAS library, which handles forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


if __name__ == "__main__":
    main()
