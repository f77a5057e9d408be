"""Call functions of tests in ranks: in processes forked from a server with torch and Lightning, or under torchrun.

A rank runs a function of the test module. For torchrun, ``rank_command`` returns the arguments with which this file
calls that function. Warnings in ranks are ignored.
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
# After this time, a rank dumps the stacks of its threads, which ``run_ranks`` shows on failure.
DUMP_AFTER = 120.0  # seconds
# The fork server imports these once for all tests in a process, because importing them takes seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed", "lightning.pytorch", "lightning_turbo", "pytest", __name__])


def run_ranks(function, *arguments, ranks=2, timeout=170, **variables):
    """Call a function in one process or in several gloo ranks, and wait for its end. A failure shows the output."""
    with tempfile.NamedTemporaryFile() as output:
        processes = start_ranks(function, arguments, output.name, ranks, **variables)
        try:
            _wait_for_all(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                end(process)
        codes = [process.exitcode for process in processes]
        assert not any(codes), f"ended with {codes}: {output.read().decode()[-3000:]}"


def start_ranks(function, arguments, output, ranks=2, **variables):
    """Start ranks that call a function, and return the processes."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "a test"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    own = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
    return [start(function, arguments, output, **each, **variables) for each in own]


def start(function, arguments, output, **variables):
    """Call a function in a new process whose output is appended to a file. ``end`` kills it.

    Args:
        function: A function of a module, which the process imports after its environment is set.
        arguments: Its arguments, which are pickled.
        output: Path of the output file.
        **variables: Environment variables of the process, in addition to those of this process.
    """
    environment = {**os.environ, **ENVIRONMENT, **variables}
    process = FORKS.Process(target=_program, args=(_name(function), arguments, environment, output))
    process.start()
    return process


def rank_command(function, *words):
    """Return the arguments with which torchrun starts ranks that call a function with strings."""
    return [__file__, _name(function), *map(str, words)]


def end(process):
    """Kill a process that is still running, and its children."""
    if process.is_alive():
        with suppress(ProcessLookupError):  # a process that is starting has no group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def _name(function):
    return f"{function.__module__}:{function.__qualname__}"


def _program(name, arguments, environment, output):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    # The default start method for the function; a fork has that of its server.
    multiprocessing.set_start_method(None, force=True)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[:] = [__file__, name]
    faulthandler.dump_traceback_later(DUMP_AFTER)
    _call(name, arguments)


def _wait_for_all(processes, deadline):
    """Wait until all processes have ended, one has failed, or the deadline has passed."""
    going = {process.sentinel: process for process in processes}
    while going and time.monotonic() < deadline:
        for sentinel in wait(list(going), timeout=1):
            if going.pop(sentinel).exitcode:
                return


def free_port():
    """Return a free port as a string."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def _call(name, arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module, function = name.split(":")
    getattr(importlib.import_module(module), function)(*arguments)
    if torch.distributed.is_initialized():
        # A thread of gloo may still hold the last tensor. If it frees it after Python has ended, the process aborts.
        # With torch 2.6, destroying the group deadlocks: it waits for that thread while it holds the GIL. A barrier
        # first avoids both.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _call(sys.argv[1], sys.argv[2:])
