"""Train on compressed brain volumes until a validation AUC is reached, and write down the seconds that it took."""

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
EPOCHS = 10  # length of the learning rate's schedule; a run that has not reached the AUC by then has failed
SEEDS = (0, 1, 2)
BATCH = 16
LEARNING_RATE = 0.003  # the highest of the schedule: the AUC rises over some epochs
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- records: made by python -m examples.speedrun -->", "<!-- end of records -->"
HEAD = ["Date", "Row", "Seconds", "of which training", "Epochs", "AUC", "Machine", "Commit"]
ROWS = {
    "baseline": "a `DataLoader` and a `Trainer` as Lightning's documentation writes them",
    "workers": "stock Lightning with two persistent worker processes and `bf16-mixed`",
    "best": '`cache_transforms`, `PackedDataset.collate`, `ApexAMP("O1")`, `strategy="turbo"`',
}


class UntilReached(Callback):
    """Measures the AUC of each validation, and ends the training when it is reached."""

    def __init__(self, auc: float) -> None:
        self.auc = auc
        self.reached: list[float] = []

    def on_validation_epoch_start(self, trainer, pl_module):
        """Begin without scores."""
        self.scores, self.labels = [], []

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        """Keep the labels, and by a hook the scores of the same batch."""
        self.labels.append(batch[1])
        self.hook = pl_module.net.register_forward_hook(self._keep)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        """Take the hook away: in training nothing is kept."""
        self.hook.remove()

    def _keep(self, net, inputs, logits):
        self.scores.append((logits[:, 1] - logits[:, 0]).float())

    def on_validation_epoch_end(self, trainer, pl_module):
        """Compare the AUC with the goal."""
        self.reached.append(float(roc_auc_score(torch.cat(self.labels), torch.cat(self.scores))))
        trainer.should_stop = self.reached[-1] >= self.auc


def loaders(row: str, volumes: Path, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of training and validation of a row; packing is part of the run, and of its time."""
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
    # A generator of the sampler's own: from the global one, worker processes would draw in between.
    order = RandomSampler(parts[0], generator=torch.Generator().manual_seed(seed))
    return DataLoader(parts[0], sampler=order, **options), DataLoader(parts[1], **options)


def trainer_settings(row: str) -> dict[str, Any]:
    """Return the arguments of the Trainer that a row adds."""
    if row == "best":
        return {"strategy": "turbo", "plugins": [ApexAMP("O1")]}
    return {"precision": "bf16-mixed"} if row == "workers" else {}


def train(row: str, volumes: Path, seed: int, auc: float, epochs: int) -> dict[str, Any]:
    """Train the row's run in this process.

    Args:
        row: A key of ``ROWS``.
        volumes: Folder of the compressed volumes.
        seed: Of weights and order: each row begins with the same weights and sees the same batches.
        auc: Where training ends, from 0 to 1.
        epochs: Of the schedule, at most.

    Returns:
        The AUC after each epoch, and the seconds of loaders, packing and ``fit``.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    net, until = DemoNet(dims=3, classes=2, learning_rate=LEARNING_RATE), UntilReached(auc)
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, num_sanity_val_steps=0, callbacks=[until],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **trainer_settings(row),
    )  # fmt: skip
    trainer.fit(net, *loaders(row, volumes, seed))
    return {"auc": until.reached, "seconds": time.perf_counter() - started}


def timed(row: str, volumes: Path, seed: int, auc: float, epochs: int) -> dict[str, Any]:
    """Train in a fresh process without caches, and time it from its start to its end, imports included."""
    shutil.rmtree(volumes / "caches", ignore_errors=True)
    words = ["--one", row, "--seed", str(seed), "--auc", str(auc), "--epochs", str(epochs), "--volumes", str(volumes)]
    started = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "examples.speedrun", *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    whole = time.perf_counter() - started
    return {**json.loads(ran.stdout.splitlines()[-1]), "whole": whole}


def summary(row: str, runs: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    """Return the cells of a record: medians of the runs, and the lowest AUC."""
    whole, fit, epochs = (
        statistics.median(values)
        for values in ([r["whole"] for r in runs], [r["seconds"] for r in runs], [len(r["auc"]) for r in runs])
    )
    machine = f"{facts['processor']}, {facts['cores']} cores{facts['note']}"
    lowest = min(run["auc"][-1] for run in runs)
    cells = [f"{whole:.1f}", f"{fit:.1f}", f"{epochs:g}", f"{lowest:.3f}", machine, facts["commit"][:7]]
    return [f"{datetime.now(timezone.utc):%Y-%m-%d}", row, *cells]


def record(rows: list[list[str]], page: Path) -> None:
    """Add the rows to the table of the page, below the records that it has."""
    before, _, rest = page.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    old = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    page.write_text("\n".join([before + BEGIN, *markdown_table(HEAD, [*old, *rows]), END + after]))


def write(volumes: Path) -> None:
    """Write both parts of the patches once; every run reads these files."""
    data = load_mni()
    for name, part in (("train", data.train), ("val", data.val)):
        if not (volumes / name).exists():
            write_volumes(part, volumes / name)


def main(argv: list[str] | None = None) -> int:
    """Run the rows in turns, one seed after another; return 1 if a run did not reach the AUC."""
    parser = argparse.ArgumentParser(prog="python -m examples.speedrun", description=__doc__)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=["baseline", "best"], help=", ".join(ROWS))
    parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=list(SEEDS))
    parser.add_argument("--auc", type=float, default=AUC, help=f"where training ends (default: {AUC})")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"at most (default: {EPOCHS})")
    parser.add_argument("--volumes", type=Path, default=Path("runs/speedrun"), help="folder of the volumes")
    parser.add_argument("--page", type=Path, help="page whose table takes the records; README.md here for a record")
    parser.add_argument("--note", default="", help="what the record says of the machine, as 'busy'")
    parser.add_argument("--one", choices=list(ROWS), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if asked.one:
        print(json.dumps(train(asked.one, asked.volumes, asked.seed, asked.auc, asked.epochs)))
        return 0
    if unknown := set(asked.rows) - set(ROWS):
        parser.error(f"--rows: expected some of {','.join(ROWS)}, got {','.join(sorted(unknown))}")
    write(asked.volumes)
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in asked.rows}
    for seed in asked.seeds:
        for row in asked.rows:
            ran = timed(row, asked.volumes, seed, asked.auc, asked.epochs)
            runs[row].append(ran)
            said = f"AUC {ran['auc'][-1]:.3f} after {len(ran['auc'])} epochs"
            print(
                f"{row}, seed {seed}: {ran['whole']:.1f} s, {ran['seconds']:.1f} of them training, {said}", flush=True
            )
    missed = [row for row in runs if any(run["auc"][-1] < asked.auc for run in runs[row])]
    if missed:
        print(f"Not reached by {', '.join(missed)}: an AUC of {asked.auc}. No record.")
        return 1
    machine = describe_machine("cpu")
    facts = {**machine, "note": asked.note and f", {asked.note}"}
    rows = [summary(row, runs[row], facts) for row in asked.rows]
    print("\n".join(markdown_table(HEAD, rows)))
    if asked.page is not None:
        record(rows, asked.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
