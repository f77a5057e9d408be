"""Runs of Ray Train with two workers on one machine: ``python tests/ray_runs.py CASE FOLDER`` writes FOLDER/found.json.

Each case is a program of its own, because Ray leaves threads and processes behind.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",  # Ray takes a report in this often
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}

import ray
import ray.train
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.train.lightning import RayLightningEnvironment, prepare_trainer

from examples.ray_train import __main__ as example
from lightning_turbo import AtomicCheckpointIO
from lightning_turbo.ray import RayTurboDDPStrategy, ReportSteps

REMAINING = 6  # seconds from the message that a node will be taken away


def found_in(folder):
    """Return what is to be read of a run: where it went on, on how many workers, and how samples were used."""
    files = sorted((int(path.stem.removeprefix("since-")), path.suffix) for path in folder.glob("since-*"))
    return {"files": [f"{since}{rank}" for since, rank in files], "counted": example.count(example.used(folder))}


def killed(folder):
    """A worker ends in mid-epoch, and two go on; each loader has a worker process."""
    ray.init("local", num_cpus=2)
    example.fit(folder / "failed", 2, "exit", failures=1, processes=1)
    example.fit(folder / "whole", 2, processes=1)
    return {**found_in(folder / "failed"), "same": example.same_weights(folder / "failed", folder / "whole")}


def raised(folder):
    """A worker raises, and the next run has one worker."""
    ray.init("local", num_cpus=2)
    error = fails(lambda: example.fit(folder, 2, "raise"))
    example.fit(folder, 1)
    return {**found_in(folder), "error": error}


@contextlib.contextmanager
def two_nodes():
    """Start a cluster of two nodes with a core each, and yield it and the second one.

    Its end removes the address that Ray keeps in a file: other programs would wait minutes for this cluster.
    """
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    try:
        yield cluster, cluster.add_node(num_cpus=1, object_store_memory=10**8)
    finally:
        ray.shutdown()
        cluster.shutdown()


def elastic(folder):
    """A node is taken away with its worker; Ray goes on with one of ``num_workers=(1, 2)``."""
    with two_nodes() as (cluster, node):
        after_step(folder, 5, lambda: cluster.remove_node(node, allow_graceful=False))
        example.fit(folder, (1, 2), failures=3)
    return found_in(folder)


def drained(folder):
    """A node will be taken away: all workers report at once and go on, until Ray starts one again without the node."""

    def drain():
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        until = time.time_ns() // 10**6 + REMAINING * 1000
        ray._raylet.GcsClient(address=cluster.address).drain_node(node.node_id, reason, "a test", until)

    with two_nodes() as (cluster, node):
        after_step(folder, 2, drain)
        example.fit(folder, (1, 2), every=1000, seconds=1.0)
    return found_in(folder)


def after_step(folder, step, act):
    """Act in a thread once a rank has made a step."""

    def wait():
        while not any(f"[0, {step}," in path.read_text() for path in folder.glob("since-*")):
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


def refused(folder):
    """What a user is told who takes the strategy of other launchers."""

    def train():
        import lightning_turbo  # noqa: F401

        Trainer(accelerator="cpu", strategy="turbo_ddp", barebones=True).fit(BoringModel())

    ray.init("local", num_cpus=2)
    return {"error": fails(lambda: fit(train, folder))}


def background(folder):
    """A file that is written in a thread is whole when it is reported, and holds the states of both ranks."""

    def train():
        trainer = prepare_trainer(
            Trainer(
                accelerator="cpu",
                strategy=RayTurboDDPStrategy(checkpoint_io=AtomicCheckpointIO(background=True)),
                plugins=[RayLightningEnvironment()],
                callbacks=[ReportSteps(every_n_steps=3)],
                max_steps=8,
                limit_val_batches=0,
                logger=False,
                enable_checkpointing=False,
            )
        )
        trainer.fit(BoringModel())

    ray.init("local", num_cpus=2)
    result = fit(train, folder)
    steps, ranks = [], []
    for checkpoint, metrics in result.best_checkpoints:
        with checkpoint.as_directory() as path:
            saved = torch.load(Path(path, ReportSteps.CHECKPOINT_NAME), weights_only=False)
        steps.append([metrics["step"], saved["global_step"]])
        ranks.append(len(saved["lightning_turbo.exact_resume"]))
    return {"steps": steps, "ranks": ranks}


def fit(train, folder):
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        train,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="run", storage_path=str(folder)),
    ).fit()


def fails(run):
    try:
        run()
    except ray.train.TrainingFailedError as error:
        return str(error)
    raise AssertionError("the run has not failed")


if __name__ == "__main__":
    case, target = sys.argv[1], Path(sys.argv[2])
    found = globals()[case](target)
    (target / "found.json").write_text(json.dumps(found))
    ray.shutdown()
