"""Two hosts with addresses of their own, two ranks each: network namespaces that are joined by a pair of veth."""

import os
import socket
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_turbo
from tests.integration import hosts_worker
from tests.integration.hosts_worker import EPOCHS, JOINT, LEVELS, SAMPLES
from tests.ranks import ENVIRONMENT, RANK_SCRIPT, end

WORKER = Path(__file__).with_name("hosts_worker.py")
ROOT = Path(lightning_turbo.__file__).parent.parent
ADDRESSES = ("10.199.0.1", "10.199.0.2")
WIRED = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "wire"}
pytestmark = pytest.mark.distributed


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)


@contextmanager
def two_hosts():
    """Make the hosts and yield their names; remove them whatever happens."""
    names = [f"turbo-{os.getpid()}-{n}" for n in (0, 1)]
    commands = [["netns", "add", name] for name in names]
    commands += [["link", "add", "wire", "netns", names[0], "type", "veth", "peer", "wire", "netns", names[1]]]
    for name, address in zip(names, ADDRESSES, strict=True):
        commands += [["-n", name, "address", "add", f"{address}/24", "dev", "wire"]]
        commands += [["-n", name, "link", "set", device, "up"] for device in ("lo", "wire")]
    try:
        for command in commands:
            try:
                done = ip(*command)
            except FileNotFoundError:
                pytest.skip("needs the command ip, of the package iproute2")
            if done.returncode:
                pytest.skip(f"no network namespaces here: ip {' '.join(command)}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            try:
                ip("netns", "delete", name)  # the wire goes with it
            except FileNotFoundError:
                break


def torchrun(folder, *words, cwd=None, **variables):
    """Run a script on both hosts, two ranks each, to its end."""
    with two_hosts() as names:
        jobs = []
        try:
            for host, name in enumerate(names):
                output = open(folder / f"output.{host}", "wb")  # noqa: SIM115
                launch = [
                    "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(host),
                    "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "hosts",
                    "--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", ADDRESSES[host],
                ]  # fmt: skip
                with output:
                    jobs.append(
                        subprocess.Popen(
                            ["ip", "netns", "exec", name, sys.executable, *launch, *map(str, words)],
                            stdout=output, stderr=subprocess.STDOUT, cwd=cwd,
                            env={**os.environ, **WIRED, **variables},
                            start_new_session=True,
                        )
                    )  # fmt: skip
            for job in jobs:
                job.wait(timeout=250)
        finally:
            for job in jobs:
                end(job)
        said = [(folder / f"output.{host}").read_text() for host in (0, 1)]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(text[-3000:] for text in said)
        return said


@pytest.mark.slow
def test_four_ranks_on_two_hosts_equal_one_process_on_the_joint_batch(tmp_path):
    torchrun(tmp_path, RANK_SCRIPT, WORKER, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hosts_worker.run(tmp_path)
    for level in LEVELS:
        joint = torch.load(tmp_path / f"{level}.1.0.end", weights_only=True)
        ranks = [torch.load(tmp_path / f"{level}.4.{rank}.end", weights_only=True) for rank in range(4)]
        assert [rank["host"] for rank in ranks] == ["0", "0", "1", "1"]
        # Weights: the same bits on every rank. Beside one process, float32 sums over the batch in another order (O0, a
        # few units in the last place after 16 steps), and bfloat16 gradients that are rounded rank by rank (O2).
        close = {"O0": {"rtol": 1e-5, "atol": 1e-6}, "O2": {"rtol": 0, "atol": 2e-2}}[level]
        for name, value in joint["module"].items():
            for rank in ranks:
                assert torch.equal(rank["module"][name], ranks[0]["module"][name]), (level, name)
            torch.testing.assert_close(ranks[0]["module"][name], value, **close, msg=f"{level} {name}")
        # Every sample once an epoch.
        seen = sorted(pair for rank in ranks for pair in map(tuple, rank["seen"]))
        assert seen == [(epoch, number) for epoch in range(EPOCHS) for number in range(SAMPLES)]
        assert {len(rank["seen"]) for rank in ranks} == {EPOCHS * SAMPLES // 4}
        # Logged values are those of all ranks.
        for rank in ranks:
            assert rank["logged"] == ranks[0]["logged"]
        assert ranks[0]["logged"]["samples"] == joint["logged"]["samples"] == SAMPLES
        assert ranks[0]["logged"]["mean"] == pytest.approx(joint["logged"]["mean"], rel=1e-5 if level == "O0" else 2e-2)
        # Rank 0 alone writes.
        steps = EPOCHS * SAMPLES // JOINT
        assert [rank["written"] for rank in ranks] == [steps // 4, 0, 0, 0]
        assert len(list((tmp_path / f"{level}.4").iterdir())) == steps // 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_medmnist_example_runs_unchanged(tmp_path):
    rng, arrays = np.random.default_rng(0), {}
    for part, count in (("train", 32), ("val", 16)):
        labels = (np.arange(count) % 4 < 2).astype(np.uint8)
        images = rng.integers(0, 120, (count, 12, 12, 12))
        images[labels == 1, 3:9, 3:9, 3:9] += 100
        arrays |= {f"{part}_images": images.astype(np.uint8), f"{part}_labels": labels[:, None]}
    np.savez(tmp_path / "cubes.npz", **arrays)
    words = [
        "-m", "examples.medmnist3d", "fit", "--config", ROOT / "examples/medmnist3d/config.yaml", "--data",
        tmp_path / "cubes.npz", "--data.batch_size", "2", "--model.depth", "10", "--model.widen", "0.125",
        "--trainer.strategy", "turbo_ddp", "--trainer.accelerator", "cpu", "--trainer.max_epochs", "2",
        "--trainer.enable_progress_bar", "false",
    ]  # fmt: skip
    said = torchrun(tmp_path, *words, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert "All distributed processes registered. Starting with 4 processes" in said[0]
    checkpoints = tmp_path / "runs" / "medmnist3d" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"best.ckpt", "last.ckpt"}
    assert torch.load(checkpoints / "last.ckpt", weights_only=True)["global_step"] == 4  # 32 samples, 2 x 4 x 2 a step


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_dali_example_runs_unchanged(tmp_path):
    pytest.importorskip("nvidia.dali")
    said = torchrun(tmp_path, ROOT / "examples/imagenet_dali.py", "--demo", "--epochs", "1", cwd=tmp_path)
    assert "All distributed processes registered. Starting with 4 processes" in said[0]
    assert "validation accuracy" in said[0]
    assert "validation accuracy" not in said[1]  # one rank speaks


def test_a_port_in_use_is_said_at_once(tmp_path):
    """With is_host torchrun does not take the program on its port for a store of its own, to wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "hosts", "--rdzv-conf", "is_host=1", WORKER,
             tmp_path],
            capture_output=True, text=True, timeout=170, env={**os.environ, **WIRED},
        )  # fmt: skip
    assert done.returncode != 0
    assert f"port: {port}" in done.stderr
    assert "EADDRINUSE" in done.stderr
