"""Calls functions of tests in ranks: processes forked from one that has torch and Lightning, or started by torchrun.

What a rank does is a function of the module that tests it. For torchrun, ``rank_command`` gives the words that have
this file call it. Warnings in ranks are ignored.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch

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
FORKS.set_forkserver_preload(["torch", "torch.distributed", "lightning.pytorch", "lightning_turbo", "pytest", __name__])


def run_ranks(function, *arguments, ranks=2, timeout=170, **variables):
    """Call a function to its end in one process, or in several gloo ranks; a failure shows what they said."""
    with tempfile.NamedTemporaryFile() as said:
        processes = start_ranks(function, arguments, said.name, ranks, **variables)
        try:
            _wait_for_all(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                end(process)
        codes = [process.exitcode for process in processes]
        assert not any(codes), f"ended with {codes}: {said.read().decode()[-3000:]}"


def start_ranks(function, arguments, output, ranks=2, **variables):
    """Start ranks that call a function, and return their processes."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "a test"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    own = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
    return [start(function, arguments, output, **each, **variables) for each in own]


def start(function, arguments, output, **variables):
    """Call a function in a process of its own, whose output is appended to a file; ``end`` ends it.

    Args:
        function: One of a module, which the process imports when it has its environment.
        arguments: Its arguments; they are pickled.
        output: The path of that file.
        **variables: Of the process's environment, beside this one's.
    """
    environment = {**os.environ, **ENVIRONMENT, **variables}
    process = FORKS.Process(target=_program, args=(_name(function), arguments, environment, output))
    process.start()
    return process


def rank_command(function, *words):
    """Return the words with which torchrun starts ranks that call a function with strings."""
    return [__file__, _name(function), *map(str, words)]


def end(process):
    """Kill a program that is not at its end, and what it has started."""
    if process.is_alive():
        with suppress(ProcessLookupError):  # a process that only starts has no group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def _name(function):
    return f"{function.__module__}:{function.__qualname__}"


def _program(name, arguments, environment, output):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    # The default, for what the function starts; a fork has its server's.
    multiprocessing.set_start_method(None, force=True)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[:] = [__file__, name]
    faulthandler.dump_traceback_later(DUMP_AFTER)
    _call(name, arguments)


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


def _call(name, arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module, function = name.split(":")
    getattr(importlib.import_module(module), function)(*arguments)
    if torch.distributed.is_initialized():
        # A thread of gloo may hold the last tensor still. If it lets go of it when Python has ended, the process
        # aborts. With torch 2.6, destroying the group waits for that thread and holds the GIL that it needs; a barrier
        # does not.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _call(sys.argv[1], sys.argv[2:])
