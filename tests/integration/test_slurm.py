"""Slurm announces the end of a job: Lightning saves in the middle of it, and the next job equals one long one."""

import os
from pathlib import Path

import pytest
import torch

from tests.ranks import ENVIRONMENT, end, free_port, start
from tests.versions import KNOWS_WEIGHTS_ONLY

LEAN = pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="signals are told on the host with Lightning 2.6")
WORKER = Path(__file__).with_name("slurm_worker.py")
SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train",
}  # fmt: skip


def srun(folder, *words):
    """Run two ranks as srun would, to their end."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    variables = {**os.environ, **ENVIRONMENT, **SLURM, **address, **path}
    ranks = ({"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1"))
    jobs = [start((WORKER, folder, *words), variables | rank, folder / "output") for rank in ranks]
    try:
        for job in jobs:
            job.join(timeout=150)
        codes = [job.exitcode for job in jobs]
    finally:
        for job in jobs:
            end(job)
    assert codes == [0, 0], (folder / "output").read_text()[-3000:]


@pytest.mark.distributed
@pytest.mark.slow
@LEAN
@pytest.mark.parametrize(("batch", "ranks", "saved"), [(2, "01", 18), (2, "1", 18), (5, "0", 20)])
def test_a_job_that_is_queued_again_equals_one_that_was_never_stopped(batch, ranks, saved, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\n')
    (tmp_path / "scontrol").chmod(0o755)
    srun(tmp_path, "told", batch, ranks)  # it trains on to its end, as it would have without the signal
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
    srun(tmp_path, "again", batch, ranks)
    for rank in (0, 1):
        told, again = (torch.load(tmp_path / f"{name}.{rank}") for name in ("told", "again"))
        assert told["steps"] == again["steps"] == 9
        assert (len(told["seen"]), told["tests"], again["tests"]) == (30, 3, 2 if saved < 20 else 1)
        assert again["seen"] == told["seen"][saved:]
        assert all(torch.equal(again["module"][name], value) for name, value in told["module"].items())
