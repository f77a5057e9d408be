"""torchrun goes on with one node of two, after the other was killed: each sample of the epoch is seen once."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.elastic_worker import BATCH, EPOCHS, LENGTH
from tests.ranks import ENVIRONMENT, RANK_SCRIPT, free_port

WORKER = Path(__file__).with_name("elastic_worker.py")


def agent(folder, number, port, output):
    words = [
        "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--local-addr",
        "127.0.0.1", "--rdzv-conf", f"is_host={int(number == 0)},last_call_timeout=5", RANK_SCRIPT, WORKER, folder,
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=output, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True,
    )  # fmt: skip


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill(job):
    """Kill an agent and its ranks at once, as a machine that is switched off."""
    for pid in [job.pid, *children(job.pid)] if job.poll() is None else []:
        os.kill(pid, signal.SIGKILL)
    job.wait()


def steps(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_one_node_goes_on_where_two_were(tmp_path):
    with ExitStack() as running, open(tmp_path / "said", "wb") as output:
        port = free_port()
        jobs = [agent(tmp_path, number, port, output) for number in (0, 1)]
        for job in jobs:
            running.callback(kill, job)
        until = time.monotonic() + 120
        while len(steps(tmp_path / "2.0")) < 5 and time.monotonic() < until:
            time.sleep(0.05)
        kill(jobs[1])
        said = tmp_path / "said"
        assert jobs[0].wait(timeout=200) == 0, said.read_text()[-5000:]
    both, alone = [steps(tmp_path / f"2.{rank}") for rank in (0, 1)], steps(tmp_path / "1.0")
    resumed = alone[0][0]
    assert 2 <= resumed <= len(both[0])
    assert [line[0] for line in alone] == list(range(resumed, resumed + len(alone)))
    assert {line[2] for line in alone} == {LENGTH // BATCH}
    lines = [line for rank in both for line in rank if line[0] < resumed] + alone
    seen = sorted((epoch, index) for _, epoch, _, indices in lines for index in indices)
    assert seen == [(epoch, index) for epoch in range(EPOCHS) for index in range(LENGTH)]
    assert f"goes on at sample {resumed * 2 * BATCH} of {LENGTH}" in said.read_text()
