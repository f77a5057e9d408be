"""Train on Ray workers of which one is killed in mid-epoch, and count how often each sample was used.

python -m examples.ray_train                 # two workers, of which one is killed, and two again
python -m examples.ray_train --then 1        # go on with one worker
python -m examples.ray_train --how raise     # an error in place of a kill
python -m examples.ray_train --processes 1   # samples from a worker process of the loader
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_turbo import Preemption, Prefetch
from lightning_turbo.ray import RayTurboDDPStrategy, ReportSteps

SAMPLES, EPOCHS, BATCH = 96, 2, 4
REPORT_EVERY = 2  # steps
KILLED_AT = 5  # the step that worker 1 does not survive


class Net(LightningModule):
    """Draws random numbers in each step, and writes which samples it was given."""

    def __init__(self, folder: Path, how: str | None, seconds: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.folder, self.how, self.seconds = folder, how, seconds

    def on_train_start(self):
        """Open the file of this rank; its name has the step from which this run goes on."""
        self.file = open(self.folder / f"since-{self.global_step}.{self.global_rank}", "a")  # noqa: SIM115

    def training_step(self, batch, batch_idx):
        """Note the samples, and make the step, unless this is the worker and the step of the failure."""
        inputs, numbers = batch
        fails = self.how and (self.global_rank, self.global_step) == (1, KILLED_AT)
        if fails and not (self.folder / "failed").exists():
            (self.folder / "failed").touch()
            if self.how == "exit":
                os._exit(1)
            raise RuntimeError("planted in a step")
        time.sleep(self.seconds)
        print(json.dumps([self.current_epoch, self.global_step, numbers.tolist()]), file=self.file, flush=True)
        return self.net(inputs).square().mean()

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self):
        """Write the weights."""
        torch.save(self.net.state_dict(), self.folder / f"weights.{self.global_rank}")


def train(config: dict[str, Any]) -> None:
    """Train on one worker: the function that Ray runs on each of them, again after a failure."""
    seed_everything(1)
    report = ReportSteps(every_n_steps=config["every"])
    # Where Ray is told that a node will be taken away: report once more, and use the time that is left.
    preemption = Preemption(source=ray.train.get_preemption_info, ending=report.report)
    trainer = prepare_trainer(
        Trainer(
            accelerator="auto",
            devices="auto",
            strategy=RayTurboDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[Prefetch(), report, preemption],
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
    )
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES))
    processes = config["processes"]
    loader = DataLoader(
        data,
        batch_size=BATCH,
        shuffle=True,
        num_workers=processes,
        # A fork would copy the threads of the Ray worker in any state.
        multiprocessing_context="forkserver" if processes else None,
    )
    model = Net(Path(config["folder"]), config["how"], config["seconds"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(model, loader)
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(model, loader, ckpt_path=f"{folder}/{ReportSteps.CHECKPOINT_NAME}", weights_only=False)


def fit(
    folder: Path,
    workers: int | tuple[int, int],
    how: str | None = None,
    failures: int = 0,
    processes: int = 0,
    every: int = REPORT_EVERY,
    seconds: float = 0.0,
):
    """Train on Ray workers; go on where an earlier run in the same folder was left.

    Args:
        folder: Of Ray's checkpoints, and of what the workers write.
        workers: Their number, or the smallest and the largest number.
        how: How worker 1 fails, once: ``"exit"`` or ``"raise"``; ``None``: it does not.
        failures: How often Ray starts the workers again.
        processes: Worker processes of each loader.
        every: Steps between two reports.
        seconds: What each step takes in addition.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return TorchTrainer(
        train,
        train_loop_config={
            "folder": str(folder),
            "how": how,
            "processes": processes,
            "every": every,
            "seconds": seconds,
        },
        torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=failures),
        ),
    ).fit()


def used(folder: Path) -> list[tuple[int, int]]:
    """Return (epoch, sample) for each use that is in the weights: those of lost steps are made again."""
    runs: dict[int, list[Any]] = {}
    for path in folder.glob("since-*"):
        since = int(path.stem.removeprefix("since-"))
        runs.setdefault(since, []).extend(map(json.loads, path.read_text().splitlines()))
    starts = sorted(runs)
    return [
        (epoch, sample)
        for since, until in zip(starts, [*starts[1:], float("inf")], strict=True)
        for epoch, step, samples in runs[since]
        if step < until
        for sample in samples
    ]


def count(uses: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return how many samples were used twice in an epoch, and how many never."""
    times = Counter(uses)
    every = [times[epoch, sample] for epoch in range(EPOCHS) for sample in range(SAMPLES)]
    return sum(max(0, each - 1) for each in every), every.count(0)


def same_weights(folder: Path, other: Path) -> bool:
    """Return whether two runs ended with the same weights, bit for bit."""
    first, second = (torch.load(each / "weights.0", weights_only=True) for each in (folder, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def main() -> None:
    """Run the example, and print what was counted."""
    parser = argparse.ArgumentParser(prog="python -m examples.ray_train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--how", choices=("exit", "raise"), default="exit")
    parser.add_argument("--then", type=int, choices=(1, 2), default=2, help="workers after the failure")
    parser.add_argument("--processes", type=int, default=0, help="worker processes of each loader")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    whole, failed = root / "whole", root / "failed"
    ray.init("local", num_cpus=None if torch.cuda.is_available() else 2, log_to_driver=False)
    if options.then == 2:
        fit(failed, 2, options.how, failures=1, processes=options.processes)
    else:
        try:
            fit(failed, 2, options.how, processes=options.processes)
        except ray.train.TrainingFailedError:
            print("The run of two workers has failed.")
        fit(failed, 1, processes=options.processes)
    since = max(int(path.stem.removeprefix("since-")) for path in failed.glob("since-*"))
    print(f"Worker 1 failed in step {KILLED_AT} ({options.how}). {options.then} worker(s) went on after {since} steps.")
    twice, never = count(used(failed))
    print(f"{EPOCHS} epochs of {SAMPLES} samples: {twice} used twice, {never} never.")
    if options.then == 2:
        fit(whole, 2, processes=options.processes)
        same = "the same, bit for bit" if same_weights(failed, whole) else "others"
        print(f"A run without a failure has weights that are {same}.")
    print("Versions: torch " + torch.__version__ + ", ray " + ray.__version__)


if __name__ == "__main__":
    main()
