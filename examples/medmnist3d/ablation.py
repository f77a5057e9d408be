"""Time per epoch and AUC of each trick: ``python -m examples.medmnist3d.ablation --out runs/ablation``.

Each trick is added alone to a plain run, and all tricks are combined in the last variant. Every repetition trains all
variants with the same seed. Every second repetition reverses their order, so that a drift of the machine favors none of
them, and times are only compared within a repetition. Results are written after every run, and Ctrl-C keeps them.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from examples.medmnist3d.chart import draw, page, table
from examples.medmnist3d.data import FastVolumes, Volumes
from examples.medmnist3d.model import VolumeClassifier
from examples.medmnist3d.tricks import ALL, PLAIN, TRICKS, Variant
from lightning_turbo.errors import NoEffectWarning
from lightning_turbo.measure import Progress, describe_machine, write_json

__all__ = ["main", "train"]

VARIANTS = {"plain": PLAIN, **{f"+ {name}": PLAIN | trick for name, trick in TRICKS.items()}, "all": ALL}


class EpochTimer(Callback):
    """Measures training epochs, from before the first batch is loaded until after the last step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the measurement."""
        self._start = self._now(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Stop the measurement after the last batch, before validation."""
        if trainer.is_last_batch:
            self.seconds.append(self._now(pl_module) - self._start)

    @staticmethod
    def _now(pl_module: LightningModule) -> float:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        return time.perf_counter()


def train(variant: Variant, settings: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train one variant, and return the seconds of each epoch, the AUC and the accuracy.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once Lightning has shut down.
    """
    seed_everything(seed, verbose=False)
    timer = EpochTimer()
    data = _data(settings, FastVolumes if variant.prefetch else Volumes, seed=seed, **variant.data)
    model = VolumeClassifier(
        depth=settings.depth, widen=settings.widen, max_pool=settings.max_pool,
        epochs_up=max(0.5, settings.epochs / 4), **variant.model,
    )  # fmt: skip
    trainer = Trainer(
        accelerator=settings.device,
        devices=1,
        max_epochs=settings.epochs,
        limit_train_batches=settings.batches or 1.0,
        check_val_every_n_epoch=settings.epochs,  # only the scores after the last epoch are reported
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[make() for make in variant.plugins],
        callbacks=[timer, *(make() for make in variant.callbacks)],
        **variant.trainer,
    )
    before = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(model, datamodule=data)
    except SystemExit:  # raised by Lightning on Ctrl-C, after which it ignores the signal
        if not trainer.interrupted:
            raise
        signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt from None
    scores = {name: float(trainer.callback_metrics[f"val/{name}"]) for name in ("auc", "accuracy")}
    return {"seed": seed, "epoch_seconds": timer.seconds, **scores}


def run(settings: argparse.Namespace, progress: Progress, arguments: Sequence[str] = ()) -> int:
    """Train all variants in every repetition. Write results.json after each run, and the figure and page at the end."""
    names = [name for name in VARIANTS if not settings.only or name in ("plain", *settings.only)]
    if settings.data == "mni152" and "+ packed" in names:
        names.remove("+ packed")  # these cubes are in memory
    device = "cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu"
    facts = describe_machine(device)
    results: dict[str, Any] = {
        "format": 1,
        "arguments": list(arguments),
        "machine": {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "device": facts.get("gpu", facts["processor"]),
            "threads": torch.get_num_threads(),
            "torch": facts["versions"]["torch"],
        },
        "facts": facts,
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(settings).items()},
        "variants": {name: {"runs": []} for name in names},
    }
    status = 0
    try:
        for repeat in range(settings.repeats):
            for name in names if repeat % 2 == 0 else reversed(names):
                progress.show(f"repetition {repeat + 1} of {settings.repeats}, {name}")
                results["variants"][name]["runs"].append(train(VARIANTS[name], settings, repeat))
                write_json(results, settings.out / "results.json")
    except KeyboardInterrupt:
        progress.say("Interrupted. The results of complete runs are kept.")
        status = 130
    if any(row["runs"] for row in results["variants"].values()):
        draw(results, settings.out / "ablation.png")
        (settings.out / "ablation.md").write_text(page(results, "ablation.png"))
        progress.say(f"{table(results)}\n{settings.out / 'results.json'}  {settings.out / 'ablation.png'}")
    return status


def _data(settings: argparse.Namespace, kind: type[Volumes], **arguments: Any) -> Volumes:
    given = {name: getattr(settings, name) for name in ("positive", "batch_size", "thin")}
    return kind(source=settings.data, **given, **arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. ``--quick`` changes the defaults to the smallest ones that test the program."""
    parser = argparse.ArgumentParser(
        "python -m examples.medmnist3d.ablation", description="Time per epoch and AUC of each trick."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/ablation"), help="folder for results.json and ablation.png"
    )
    parser.add_argument("--data", default="mni152", help="mni152, path.npz, or a dataset of the package medmnist")
    parser.add_argument("--thin", type=_count, default=1, help="use only every n-th cube of mni152")
    parser.add_argument("--positive", type=int, help="label of the positive class; all others are negative")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--depth", type=int, help="depth of the ResNet (default: 18, with --quick: 10)")
    parser.add_argument("--widen", type=float, help="factor of its channels (default: 1, with --quick: 0.125)")
    parser.add_argument("--no-max-pool", dest="max_pool", action="store_false", help="the model's max_pool=False")
    parser.add_argument("--batch-size", type=_count, default=32)
    parser.add_argument("--epochs", type=_count, help="epochs per run (default: 10, with --quick: 2)")
    parser.add_argument("--repeats", type=_count, help="runs per trick (default: 3, with --quick: 1)")
    parser.add_argument("--batches", type=_count, help="training batches per epoch (default: all, with --quick: 4)")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="TRICK", help="run only plain and these")
    parser.add_argument("--quick", action="store_true", help="test the program; the numbers mean nothing")
    settings = parser.parse_args(arguments)
    full, quick = (18, 1.0, 10, 3, None), (10, 0.125, 2, 1, 4)
    for name, value in zip(
        ("depth", "widen", "epochs", "repeats", "batches"), quick if settings.quick else full, strict=True
    ):
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, which is 130 after Ctrl-C."""
    settings = parse(arguments)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out: expected a writable folder, got {str(settings.out)!r}: {error.strerror}.")
    try:
        data = _data(settings, Volumes)
        data.prepare_data()
        data.setup("fit")
    except (ImportError, OSError, ValueError) as error:
        sys.exit(str(error))
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings(), Progress() as progress:
        warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
        warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.* is deprecated.*")  # Lightning's own
        warnings.filterwarnings(
            "ignore", category=NoEffectWarning
        )  # the ablation measures whether a trick has an effect
        return run(settings, progress, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
