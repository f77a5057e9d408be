"""Ranks in processes of their own, as torchrun starts them on one machine.

``RANK_SCRIPT``, given to torchrun with another script and its words, runs that one and leaves the ranks' group.
"""

import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch

RANK_SCRIPT = str(Path(__file__))
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}


def run_ranks(worker, *words, ranks=2, timeout=170, **variables):
    """Run a script to its end in one process, or in several gloo ranks; a failure shows what it said."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), RANK_SCRIPT]
    launch = launch if ranks > 1 else []
    with subprocess.Popen(
        [sys.executable, *launch, *map(str, (worker, *words))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **ENVIRONMENT, **variables}, start_new_session=True,
    ) as job:  # fmt: skip
        try:
            said, _ = job.communicate(timeout=timeout)
        finally:
            end(job)
    assert job.returncode == 0, f"ended with {job.returncode}: {said[-3000:]}"


def free_port():
    """Return a port that nobody listens on, as a string."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def end(job):
    """End a job that is not at its end: torchrun ends its ranks on SIGTERM."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def main():
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    # A thread of gloo may hold the last tensor still. If it lets go of it when Python has ended, the process aborts.
    # With torch 2.6, destroying the group waits for that thread and holds the GIL that it needs; a barrier does not.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
