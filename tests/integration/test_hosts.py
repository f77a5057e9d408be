"""Two hosts with two ranks each, simulated by two network namespaces that a veth pair connects."""

import os
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_turbo import ApexAMP, AtomicCheckpointIO
from lightning_turbo.data.loading import prefetcher
from tests.integration.recording import gives
from tests.ranks import ENVIRONMENT, rank_command
from tests.trainers import quiet_trainer

ADDRESSES = ("10.199.0.1", "10.199.0.2")
WIRED = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "wire"}
LEVELS = ("O0", "O2")
EPOCHS, SAMPLES, JOINT = 2, 64, 8
pytestmark = pytest.mark.distributed


def samples(ranks):
    """Samples in a random order that depends only on the epoch. Lightning gives each rank its share."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    data = TensorDataset(x, y, torch.arange(SAMPLES))
    order = {"shuffle": True} if ranks > 1 else {"sampler": DistributedSampler(data, 1, 0, seed=0)}
    return gives(DataLoader(data, JOINT // ranks, **order), prefetch_batches=2)


class Net(pl.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        self.seen = []

    def training_step(self, batch, index):
        x, y, numbers = batch
        self.seen += [(self.current_epoch, number) for number in numbers.tolist()]
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y))
        self.log("samples", float(len(y)), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class CountingSaves(AtomicCheckpointIO):
    """Counts the files that this rank writes."""

    written = 0

    def save_checkpoint(self, *args, **kwargs):
        super().save_checkpoint(*args, **kwargs)
        self.written += 1


def train(folder):
    """Train at every level, and save the samples and the final weights of this rank."""
    folder = Path(folder)
    prefetcher.MIN_SECONDS = 0.0  # every prefetching loader gets a thread, although it is fast
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    for level in LEVELS:
        # The ranks start with different weights, which DDP must replace with those of rank 0.
        model, io = Net(seed=rank), CountingSaves()
        saves = ModelCheckpoint(folder / f"{level}.{ranks}", every_n_train_steps=4, save_top_k=-1, filename="{step}")
        trainer = quiet_trainer(
            devices=ranks // nodes, num_nodes=nodes, strategy="turbo_ddp" if ranks > 1 else "auto", max_epochs=EPOCHS,
            callbacks=[saves], plugins=[ApexAMP(level, dtype=torch.bfloat16), io], enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit(model, samples(ranks))
        end = {
            "module": {name: value.clone() for name, value in model.state_dict().items()},
            "seen": model.seen,
            "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "written": io.written,
            "host": os.environ.get("GROUP_RANK"),
        }
        torch.save(end, folder / f"{level}.{ranks}.{rank}.end")


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)


@contextmanager
def two_hosts():
    """Create the hosts, yield their names, and always remove them."""
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
                ip("netns", "delete", name)  # this removes the veth pair too
            except FileNotFoundError:
                break


def torchrun(folder, *words):
    """Run a script on both hosts with two ranks each until it ends."""
    with two_hosts() as names, ExitStack() as running:
        jobs = []
        for host, name in enumerate(names):
            launch = [
                "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(host),
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "hosts",
                "--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", ADDRESSES[host],
            ]  # fmt: skip
            job = subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *launch, *words],
                stdout=running.enter_context(open(folder / f"output.{host}", "wb")), stderr=subprocess.STDOUT,
                env={**os.environ, **WIRED}, start_new_session=True,
            )  # fmt: skip
            running.callback(end, job)
            jobs.append(job)
        for job in jobs:
            job.wait(timeout=250)
        said = [(folder / f"output.{host}").read_text()[-3000:] for host in (0, 1)]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)


def end(job):
    """End a job that still runs: torchrun ends its ranks on SIGTERM."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.mark.slow
def test_four_ranks_on_two_hosts_equal_one_process_on_the_joint_batch(tmp_path, every_loader_has_a_thread):
    torchrun(tmp_path, *rank_command(train, tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(tmp_path)
    for level in LEVELS:
        joint = torch.load(tmp_path / f"{level}.1.0.end", weights_only=True)
        ranks = [torch.load(tmp_path / f"{level}.4.{rank}.end", weights_only=True) for rank in range(4)]
        assert [rank["host"] for rank in ranks] == ["0", "0", "1", "1"]
        # All ranks have the same weights, bit for bit. Those of one process differ: its float32 sums have another order
        # (O0, a few units in the last place after 16 steps), and each rank rounds its bfloat16 gradients (O2).
        close = {"O0": {"rtol": 1e-5, "atol": 1e-6}, "O2": {"rtol": 0, "atol": 2e-2}}[level]
        for name, value in joint["module"].items():
            for rank in ranks:
                assert torch.equal(rank["module"][name], ranks[0]["module"][name]), (level, name)
            torch.testing.assert_close(ranks[0]["module"][name], value, **close, msg=f"{level} {name}")
        # Every sample is used once per epoch.
        seen = sorted(pair for rank in ranks for pair in map(tuple, rank["seen"]))
        assert seen == [(epoch, number) for epoch in range(EPOCHS) for number in range(SAMPLES)]
        assert {len(rank["seen"]) for rank in ranks} == {EPOCHS * SAMPLES // 4}
        # Logged values are averaged over all ranks.
        for rank in ranks:
            assert rank["logged"] == ranks[0]["logged"]
        assert ranks[0]["logged"]["samples"] == joint["logged"]["samples"] == SAMPLES
        assert ranks[0]["logged"]["mean"] == pytest.approx(joint["logged"]["mean"], rel=1e-5 if level == "O0" else 2e-2)
        # Only rank 0 writes files.
        steps = EPOCHS * SAMPLES // JOINT
        assert [rank["written"] for rank in ranks] == [steps // 4, 0, 0, 0]
        assert len(list((tmp_path / f"{level}.4").iterdir())) == steps // 4
