"""Train digits at O0 to O3; then tune a script that trains on volumes, and train with and without what helped."""

from __future__ import annotations

import argparse
import json
import logging
import runpy
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from examples.demo import volumes
from examples.demo.data import DemoData, load_digits, load_mni
from examples.demo.model import DemoNet
from lightning_turbo import ApexAMP
from lightning_turbo.measure import Bar, draw_bars

FLOOR = 0.95  # validation accuracy that every level has to reach on digits
VOLUME_EPOCHS = 6
TRIED = "prefetch,workers-1,workers-2,lean,O1,O2"  # what two minutes are enough for; tune itself knows more
COLOURS = {"O0": "#8b949e", "O1": "#1f8fdb", "O2": "#00a37a", "O3": "#e0702a"}


class Record(Callback):
    """Keeps the loss of each step, and the seconds and the validation accuracy of each epoch."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.seconds: list[float] = []
        self.accuracies: list[float] = []

    def on_train_epoch_start(self, trainer, pl_module):
        """Start the clock."""
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Keep the loss on its device; the clock stops at the last batch, before validation."""
        self.losses.append(outputs["loss"].detach().float())
        if trainer.is_last_batch:
            self.losses[-1].item()  # waits for the device
            self.seconds.append(time.perf_counter() - self.started)

    def on_validation_epoch_end(self, trainer, pl_module):
        """Keep the accuracy."""
        self.accuracies.append(float(trainer.callback_metrics["val_accuracy"]))


def train(data: DemoData, epochs: int, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one network and return its results; ``settings`` are arguments of the Trainer."""
    torch.manual_seed(0)
    record = Record()
    settings = {**settings, "callbacks": [*settings.get("callbacks", []), record]}
    trainer = Trainer(
        accelerator=device, devices=1, max_epochs=epochs, logger=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **settings,
    )  # fmt: skip
    net = DemoNet(dims=data.dims, classes=data.classes)
    trainer.fit(net, DataLoader(data.train, data.batch_size, shuffle=True), DataLoader(data.val, 32))
    seconds = statistics.median(record.seconds[1:] or record.seconds)  # the first epoch is a warm-up
    return {
        "accuracy": record.accuracies[-1],
        "seconds_per_epoch": seconds,
        "samples_per_second": len(data.train) / seconds,
        "losses": [loss.item() for loss in record.losses],
    }


def train_levels(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Train digits at each level."""
    data = load_digits(seed=0)
    print(f"Digits, {options.epochs} epochs each", flush=True)
    for level in options.levels:
        row = train(data, options.epochs, options.device, {"plugins": [ApexAMP(level)]})
        results["levels"][level] = row
        save(results, options.out)
        print(f"  {level}  accuracy {row['accuracy']:.3f}  {row['samples_per_second']:,.0f} samples/s", flush=True)


def train_volumes(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write the volumes to files, tune the script that trains on them, and train with and without what it found."""
    data, folder = load_mni(), options.out / "volumes"
    shutil.rmtree(folder, ignore_errors=True)
    files = volumes.write_volumes(data.train, folder)
    print(f"Volumes: {len(files)} compressed files in {folder}", flush=True)
    command = ["tune", "--minutes", str(options.minutes), "--only", TRIED, "--out", str(options.out / "tune")]
    script = [volumes.__file__, str(folder), options.device]
    subprocess.run([sys.executable, "-m", "lightning_turbo", *command, *script], check=True)
    turbo = runpy.run_path(str(options.out / "tune" / "turbo.py"))["turbo"]
    chosen = json.loads((options.out / "tune" / "tune.json").read_text())["chosen"]["settings"]
    data = DemoData(train=files, val=data.val, dims=3, classes=2, batch_size=data.batch_size)
    rows = {
        "stock": train(data, VOLUME_EPOCHS, options.device, {}),
        "tuned": train(data, VOLUME_EPOCHS, options.device, turbo([])),
    }
    factor = rows["stock"]["seconds_per_epoch"] / rows["tuned"]["seconds_per_epoch"]
    gain = f"{factor:.2f} times as fast with {' + '.join(chosen)}" if chosen else "Nothing was found that helps"
    accuracies = " and ".join(f"{row['accuracy']:.1%}" for row in rows.values())
    results["volumes"] = {"headline": f"{gain}; accuracy {accuracies}", "settings": chosen, "rows": rows}
    save(results, options.out)
    print(f"Volumes: {results['volumes']['headline']}", flush=True)


def save(results: dict[str, Any], out: Path) -> None:
    """Write what is complete, so that Ctrl-C loses one training at most."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))


def draw(levels: dict[str, Any], path: Path) -> None:
    """Draw the accuracies and the losses of the levels; speed, which differs from run to run, is printed alone."""
    reached = {level: row["accuracy"] for level, row in levels.items()}
    bars = [Bar(name=level, value=x, low=x, high=x, kind=level, text=f"{x:.1%}") for level, x in reached.items()]
    losses = {level: torch.tensor(row["losses"]) for level, row in levels.items()}
    curves = {level: values.unfold(0, min(15, len(values)), 1).mean(1) for level, values in losses.items()}
    label = "validation accuracy on digits; below, the training loss, mean of 15 steps"
    draw_bars(bars, path, title="One network at each level", label=label, colours=COLOURS, curves=curves)


def main(argv: list[str] | None = None) -> int:
    """Run both parts; return 1 if a level stays below the accuracy that it has to reach."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--levels", type=lambda text: text.split(","), default=["O0", "O1", "O2", "O3"])
    parser.add_argument("--epochs", type=int, default=10, help="on digits; every level reaches its accuracy in 10")
    parser.add_argument("--minutes", type=float, default=2.0, help="for tune on the volumes; 0 leaves them out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args(argv)
    if unknown := set(options.levels) - {"O0", "O1", "O2", "O3"}:
        parser.error(f"--levels: expected some of O0,O1,O2,O3 (letter O, not zero), got {','.join(sorted(unknown))}")
    torch.set_num_threads(1)  # more would wait for each other on layers this small; the other cores load
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.. is deprecated.*")  # Lightning's own
    results: dict[str, Any] = {"levels": {}, "volumes": None}
    train_levels(options, results)
    if options.minutes:
        train_volumes(options, results)
    draw(results["levels"], options.out / "demo.png")
    print(f"wrote {options.out / 'results.json'} and {options.out / 'demo.png'}")
    low = {level: row["accuracy"] for level, row in results["levels"].items() if row["accuracy"] < FLOOR}
    for level, accuracy in low.items():
        print(f"{level}: expected an accuracy of {FLOOR}, got {accuracy:.3f}. More epochs may help: --epochs N.")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
