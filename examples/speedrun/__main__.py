"""Train on compressed brain volumes until a validation AUC is reached, and record the seconds that this took."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, RandomSampler

from examples.demo.data import load_mni
from examples.demo.model import DemoNet
from examples.demo.volumes import CompressedVolumes, write_volumes
from lightning_turbo import ApexAMP, PackedDataset
from lightning_turbo.data import cache_transforms, stamp_files
from lightning_turbo.measure import describe_machine, markdown_table

AUC = 0.985  # on validation, the same for all rows
EPOCHS = 10  # of the learning rate schedule; a run that does not reach the AUC within them has failed
SEEDS = (0, 1, 2)
BATCH = 16
LEARNING_RATE = 0.003  # highest one of the schedule; low enough that the AUC rises over several epochs
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- records: made by python -m examples.speedrun -->", "<!-- end of records -->"
HEAD = ["Date", "Row", "Seconds", "of which training", "Epochs", "AUC", "Machine", "Commit"]
ROWS = {
    "baseline": "a `DataLoader` and a `Trainer` as in Lightning's documentation",
    "workers": "stock Lightning with two persistent worker processes and `bf16-mixed`",
    "best": '`cache_transforms`, `PackedDataset.collate`, `ApexAMP("O1")`, `strategy="turbo"`',
}


class StopAtAUC(Callback):
    """Computes the AUC of each validation, and stops training when it is at least ``auc``."""

    def __init__(self, auc: float) -> None:
        self.auc = auc
        self.history: list[float] = []

    def on_validation_epoch_start(self, trainer, pl_module):
        """Clear the scores and labels."""
        self.scores, self.labels = [], []

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        """Collect the labels of the batch, and its scores with a forward hook."""
        self.labels.append(batch[1])
        self.hook = pl_module.net.register_forward_hook(self._keep)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        """Remove the hook, so that no scores are collected in training."""
        self.hook.remove()

    def _keep(self, net, inputs, logits):
        self.scores.append((logits[:, 1] - logits[:, 0]).float())

    def on_validation_epoch_end(self, trainer, pl_module):
        """Compute the AUC, and stop training if it is reached."""
        self.history.append(float(roc_auc_score(torch.cat(self.labels), torch.cat(self.scores))))
        trainer.should_stop = self.history[-1] >= self.auc


def loaders(row: str, volumes: Path, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the training and validation loaders of a row. Packing happens here, so it is part of the measured time."""
    options: dict[str, Any] = {"batch_size": BATCH}
    if row == "workers":
        options |= {"num_workers": 2, "persistent_workers": True}
    parts: list[Any] = [CompressedVolumes(volumes / name) for name in ("train", "val")]
    if row == "best":
        caches = volumes / "caches"
        parts = [
            PackedDataset(cache_transforms(part, caches, key=stamp_files(volumes / name), num_workers=2))
            for name, part in zip(("train", "val"), parts, strict=True)
        ]
        options |= {"collate_fn": PackedDataset.collate}
    # The sampler has its own generator, because DataLoader draws the seeds of worker processes from the global one.
    order = RandomSampler(parts[0], generator=torch.Generator().manual_seed(seed))
    return DataLoader(parts[0], sampler=order, **options), DataLoader(parts[1], **options)


def trainer_settings(row: str) -> dict[str, Any]:
    """Return the Trainer arguments of a row."""
    if row == "best":
        return {"strategy": "turbo", "plugins": [ApexAMP("O1")]}
    return {"precision": "bf16-mixed"} if row == "workers" else {}


def train(row: str, volumes: Path, seed: int, auc: float, epochs: int) -> dict[str, Any]:
    """Train one run of a row in this process.

    Args:
        row: A key of ``ROWS``.
        volumes: Folder with the compressed volumes.
        seed: Seed of the weights and of the order. Each row starts with the same weights and sees the same batches.
        auc: AUC at which training stops, from 0 to 1.
        epochs: Maximum number of epochs, and length of the learning rate schedule.

    Returns:
        The AUC after each epoch, and the seconds of creating the loaders, packing and ``fit``.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    net, stop = DemoNet(dims=3, classes=2, learning_rate=LEARNING_RATE), StopAtAUC(auc)
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, num_sanity_val_steps=0, callbacks=[stop],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **trainer_settings(row),
    )  # fmt: skip
    trainer.fit(net, *loaders(row, volumes, seed))
    return {"auc": stop.history, "seconds": time.perf_counter() - started}


def run_process(row: str, volumes: Path, seed: int, auc: float, epochs: int) -> dict[str, Any]:
    """Train in a new process without caches, and measure the seconds from its start to its end, imports included."""
    shutil.rmtree(volumes / "caches", ignore_errors=True)
    words = ["--one", row, "--seed", str(seed), "--auc", str(auc), "--epochs", str(epochs), "--volumes", str(volumes)]
    started = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "examples.speedrun", *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    whole = time.perf_counter() - started
    return {**json.loads(process.stdout.splitlines()[-1]), "whole": whole}


def summary(row: str, runs: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    """Return the cells of a record: the medians of the runs and the lowest AUC."""
    whole, fit, epochs = (
        statistics.median(values)
        for values in ([r["whole"] for r in runs], [r["seconds"] for r in runs], [len(r["auc"]) for r in runs])
    )
    machine = f"{facts['processor']}, {facts['cores']} cores{facts['note']}"
    lowest = min(run["auc"][-1] for run in runs)
    cells = [f"{whole:.1f}", f"{fit:.1f}", f"{epochs:g}", f"{lowest:.3f}", machine, facts["commit"][:7]]
    return [f"{datetime.now(timezone.utc):%Y-%m-%d}", row, *cells]


def record(rows: list[list[str]], page: Path) -> None:
    """Append the rows to the table of records in the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    old = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    page.write_text("\n".join([before + BEGIN, *markdown_table(HEAD, [*old, *rows]), END + after]))


def write_parts(volumes: Path) -> None:
    """Write the files of both parts, unless they exist. Every run reads these files."""
    data = load_mni()
    for name, part in (("train", data.train), ("val", data.val)):
        if not (volumes / name).exists():
            write_volumes(part, volumes / name)


def main(argv: list[str] | None = None) -> int:
    """Run all rows with one seed after another, and return the exit status: 1 if a run did not reach the AUC."""
    parser = argparse.ArgumentParser(prog="python -m examples.speedrun", description=__doc__)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=["baseline", "best"], help=", ".join(ROWS))
    parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=list(SEEDS))
    parser.add_argument("--auc", type=float, default=AUC, help=f"AUC at which training stops (default: {AUC})")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"maximum number of epochs (default: {EPOCHS})")
    parser.add_argument("--volumes", type=Path, default=Path("runs/speedrun"), help="folder for the volumes")
    parser.add_argument("--page", type=Path, help="page to append the records to, for example README.md")
    parser.add_argument("--note", default="", help="a remark on the machine for the record, for example 'busy'")
    parser.add_argument("--one", choices=list(ROWS), help=argparse.SUPPRESS)  # train one run in this process
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if args.one:
        print(json.dumps(train(args.one, args.volumes, args.seed, args.auc, args.epochs)))
        return 0
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"--rows: expected some of {','.join(ROWS)}, got {','.join(sorted(unknown))}")
    write_parts(args.volumes)
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in args.rows}
    for seed in args.seeds:
        for row in args.rows:
            result = run_process(row, args.volumes, seed, args.auc, args.epochs)
            runs[row].append(result)
            reached = f"AUC {result['auc'][-1]:.3f} after {len(result['auc'])} epochs"
            print(
                f"{row}, seed {seed}: {result['whole']:.1f} s, of which training {result['seconds']:.1f} s; {reached}",
                flush=True,
            )
    missed = [row for row in runs if any(run["auc"][-1] < args.auc for run in runs[row])]
    if missed:
        print(f"No record: {', '.join(missed)} did not reach an AUC of {args.auc}.")
        return 1
    machine = describe_machine("cpu")
    facts = {**machine, "note": args.note and f", {args.note}"}
    rows = [summary(row, runs[row], facts) for row in args.rows]
    print("\n".join(markdown_table(HEAD, rows)))
    if args.page is not None:
        record(rows, args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
