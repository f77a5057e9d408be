"""Ranks in processes of their own: forked from one that has torch and Lightning, or as torchrun starts them.

``RANK_SCRIPT``, given to torchrun with another script and its words, runs that one and leaves the ranks' group.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch

RANK_SCRIPT = str(Path(__file__))
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}
# A rank that still runs then writes where each of its threads is, which the failure of ``run_ranks`` shows.
DUMP_AFTER = 120.0  # seconds
# The server of forks imports these once for all tests of a process; a program would import them for seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed", "lightning.pytorch", "lightning_turbo", __name__])


def run_ranks(worker, *words, ranks=2, timeout=170, **variables):
    """Run a script to its end in one process, or in several gloo ranks; a failure shows what it said."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "a test"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.NamedTemporaryFile() as said:
        processes = []
        for rank in range(ranks):
            own = job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} if ranks > 1 else {}
            environment = {**os.environ, **ENVIRONMENT, **own, **variables}
            processes.append(start((worker, *words), environment, said.name))
        try:
            _wait_for_all(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                end(process)
        codes = [process.exitcode for process in processes]
        assert not any(codes), f"ended with {codes}: {said.read().decode()[-3000:]}"


def start(words, environment, output):
    """Start a script with its words in a process of its own, whose output is appended to a file; ``end`` ends it."""
    process = FORKS.Process(target=_program, args=([*map(str, words)], environment, output))
    process.start()
    return process


def end(process):
    """Kill a program that is not at its end, and what it has started."""
    if process.is_alive():
        with suppress(ProcessLookupError):  # a process that only starts has no group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def _program(argv, environment, output):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(
        None, force=True
    )  # the default, for what the script starts; a fork has its server's
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(DUMP_AFTER)
    torch.set_num_threads(1)
    sys.argv[:] = [RANK_SCRIPT, *argv]
    main() if "RANK" in environment else _run_script()


def _wait_for_all(processes, deadline):
    """Return when all have ended, one has failed, or time is over."""
    going = {process.sentinel: process for process in processes}
    while going and time.monotonic() < deadline:
        for sentinel in wait(list(going), timeout=1):
            if going.pop(sentinel).exitcode:
                return


def free_port():
    """Return a port that nobody listens on, as a string."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def _run_script():
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main():
    _run_script()
    # A thread of gloo may hold the last tensor still. If it lets go of it when Python has ended, the process aborts.
    # With torch 2.6, destroying the group waits for that thread and holds the GIL that it needs; a barrier does not.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
