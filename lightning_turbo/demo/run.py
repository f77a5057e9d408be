"""Run of the demo: train the levels, which take turns epoch by epoch, and report."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader, DistributedSampler

from lightning_turbo._checks import expect
from lightning_turbo._lightning import ModelCheckpoint, TensorBoardLogger, Trainer, bound_name
from lightning_turbo.demo.data import DemoData, load_digits, load_mni
from lightning_turbo.demo.figure import draw_results
from lightning_turbo.demo.history import RunHistory, past_history
from lightning_turbo.demo.model import DemoNet
from lightning_turbo.demo.progress import RunProgress
from lightning_turbo.demo.report import FORMAT, level_row, machine, results_table, write_results
from lightning_turbo.demo.settings import EPOCHS, LEVELS, DemoError, DemoSettings
from lightning_turbo.plugins.apex_amp import ApexAMP
from lightning_turbo.plugins.checkpoint_io import AtomicCheckpointIO

__all__ = ["BATCH_SIZE", "run_demo", "train_epoch"]

BATCH_SIZE = 32
PASSED, TOO_LOW, INTERRUPTED = 0, 1, 130


def run_demo(settings: DemoSettings, console: Console | None = None) -> int:
    """Train a small network at each level, and write results.json, a chart, logs and checkpoints.

    Args:
        settings: The settings. Without ``settings.resume``, the run replaces the results in ``settings.out``.
        console: Output of progress and table. Default: standard output.

    Returns:
        Exit status: 0 if every level reaches its accuracy, 1 if one does not, 130 after Ctrl-C. Speed has no effect.

    Raises:
        DemoError: If the device is absent, ``out`` cannot be written, or there is nothing to resume.
        MissingExtraError: If a package of the ``demo`` extra is not installed.
        OSError: If a file cannot be written during training, for example because the disk is full. Files from before
            stay.

    Note:
        The levels take turns epoch by epoch, so that a temporary load on the machine slows all of them. The results are
        a demonstration, not a benchmark.
    """
    console = console or Console()
    device = _device(settings.device)
    results = _resume(settings) if settings.resume else _start(settings)
    asked, out = results["settings"], settings.out
    data = load_digits(asked["seed"]) if asked["data"] == "digits" else load_mni()
    with _quiet_lightning(), _threads(data):
        results |= {"machine": machine(device), "floor": data.floor, "majority": data.majority}
        stopped = not _train_levels(settings.levels or tuple(asked["levels"]), data, results, console, device, out)
    draw_results(results, out / "demo.png")
    _conclude(console, results, out, stopped)
    if stopped:
        return INTERRUPTED
    return PASSED if all(row["passed"] for row in results["levels"].values()) else TOO_LOW


def _train_levels(
    levels: tuple[str, ...], data: DemoData, results: dict[str, Any], console: Console, device: torch.device, out: Path
) -> bool:
    """Train the levels in turns and update the results after each epoch; return False after Ctrl-C."""
    epochs, seed = results["settings"]["epochs"], results["settings"]["seed"]
    histories = {level: _history(data, _checkpoint(out, level)) for level in levels}
    per_epoch = math.ceil(len(data.train) / BATCH_SIZE)
    done = per_epoch * sum(min(history.epochs, epochs) for history in histories.values())
    _print(
        console,
        f"{data.name}: {len(data.train)} training and {len(data.val)} validation samples, "
        f"{epochs} epochs at {', '.join(levels)} on {results['machine']['device']}",
    )

    def write() -> None:
        for level, history in histories.items():
            results["levels"][level] = level_row(history, epochs=epochs, floor=data.floor)
        write_results(results, out / "results.json")

    write()
    turns = [(epoch, level) for epoch in range(1, epochs + 1) for level in levels if histories[level].epochs < epoch]
    with RunProgress(console, steps=len(levels) * epochs * per_epoch, done=done) as progress:
        for epoch, level in turns:
            progress.begin(level, epoch, epochs)
            try:
                train_epoch(
                    level, data, histories[level], progress,
                    epoch=epoch, total_steps=epochs * per_epoch, seed=seed, device=device, out=out,
                )  # fmt: skip
            except KeyboardInterrupt:
                return False
            write()
    return True


def train_epoch(
    level: str,
    data: DemoData,
    history: RunHistory,
    progress: RunProgress,
    *,
    epoch: int,
    total_steps: int,
    seed: int,
    device: torch.device,
    out: Path,
) -> None:
    """Train one level up to an epoch, from its checkpoint in ``out`` if there is one.

    Args:
        level: One of O0 to O3.
        data: The task.
        history: The record of the level, which the run adds to.
        progress: Shows every step.
        epoch: Epochs in total after the call.
        total_steps: Optimizer steps of the learning rate's schedule.
        seed: Seeds the weights and the order of the samples.
        device: Where to train.
        out: Folder of checkpoints and logs.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once Lightning has closed everything.
    """
    checkpoint = _checkpoint(out, level)
    torch.manual_seed(seed)
    # This sampler shuffles by seed and epoch alone, so that a resumed run sees the samples in the same order.
    order: DistributedSampler[Any] = DistributedSampler(data.train, num_replicas=1, rank=0, shuffle=True, seed=seed)
    saver = ModelCheckpoint(
        dirpath=checkpoint.parent, filename=level, save_on_train_epoch_end=True, enable_version_counter=False
    )
    trainer = Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        plugins=[ApexAMP(level), AtomicCheckpointIO()],
        max_epochs=epoch,
        callbacks=[history, progress, saver],
        logger=TensorBoardLogger(out, name="tensorboard", version=level, default_hp_metric=False),
        log_every_n_steps=min(10, math.ceil(history.samples / BATCH_SIZE)),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with _interruptible(trainer):
        trainer.fit(
            DemoNet(dims=data.dims, classes=data.classes, total_steps=total_steps),
            DataLoader(data.train, BATCH_SIZE, sampler=order),
            DataLoader(data.val, 256 if data.dims == 2 else BATCH_SIZE),
            ckpt_path=checkpoint if checkpoint.is_file() else None,
        )


@contextlib.contextmanager
def _interruptible(trainer: Trainer) -> Iterator[None]:
    """Raise KeyboardInterrupt after Ctrl-C: Lightning raises SystemExit, and ignores the signal afterwards."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        if not trainer.interrupted:
            raise
        signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt from None


def _history(data: DemoData, checkpoint: Path) -> RunHistory:
    history = RunHistory(samples=len(data.train))
    if checkpoint.is_file():
        history.load_state_dict(past_history(checkpoint))
    return history


def _checkpoint(out: Path, level: str) -> Path:
    return out / "checkpoints" / f"{level}.ckpt"


def _device(name: str) -> torch.device:
    """Return the device with a name, and check that this machine has it."""
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        known = ["auto", "cpu", *(f"cuda:{index}" for index in range(count))]
        expect(str(device) in known, "device", name, f"one of this machine, {', '.join(known)}", DemoError)
    return device


def _start(settings: DemoSettings) -> dict[str, Any]:
    """Return the results of a new run, and delete the files of an earlier run in the folder."""
    out = settings.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for level in LEVELS:
            _checkpoint(out, level).unlink(missing_ok=True)
            for events in (out / "tensorboard" / level).glob("events.out.tfevents.*"):
                events.unlink()
    except OSError as error:
        raise DemoError(f"out: expected a folder that can be written, got {str(out)!r} ({error.strerror}).") from error
    data = settings.data or "digits"
    asked = {
        "levels": list(settings.levels or LEVELS),
        "epochs": settings.epochs or EPOCHS[data],
        "data": data,
        "seed": settings.seed or 0,
    }
    return {"format": FORMAT, "settings": asked, "levels": {}}


def _resume(settings: DemoSettings) -> dict[str, Any]:
    """Return the results of the earlier run, updated with the new settings."""
    path = settings.out / "results.json"
    try:
        results = json.loads(path.read_text())
        rows = dict(results["levels"])
        used = {name: results["settings"][name] for name in ("data", "seed", "epochs", "levels")}
        version = results["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoError(
            f"resume: expected the results of an earlier demo, got {str(path)!r}, which is missing or not readable "
            f"({error!r}). Pass the folder of an earlier demo as out, or leave --resume out."
        ) from error
    expect(version == FORMAT, f"resume: the format of {str(path)!r}", version, f"{FORMAT}", DemoError)
    for name in ("data", "seed"):
        asked = getattr(settings, name)
        expect(asked in (None, used[name]), f"{name} with --resume", asked, f"{used[name]!r} as before", DemoError)
    levels = {*used["levels"], *(settings.levels or ())}
    used |= {"levels": [level for level in LEVELS if level in levels], "epochs": settings.epochs or used["epochs"]}
    return results | {"settings": used, "levels": {level: rows[level] for level in LEVELS if level in rows}}


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Suppress messages of Lightning that do not concern a user of the demo."""
    logger = logging.getLogger(bound_name())
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.. is deprecated.*")  # Lightning's own
            warnings.filterwarnings("ignore", ".*Checkpoint directory .* exists and is not empty.*")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _threads(data: DemoData) -> Iterator[None]:
    """Use one thread for digits: the layers are so small that threads wait longer than they compute."""
    before = torch.get_num_threads()
    if data.name == "digits":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _conclude(console: Console, results: dict[str, Any], out: Path, stopped: bool) -> None:
    """Print the table and the next commands."""
    rows, floor = results["levels"], results["floor"]
    console.print(results_table(rows, floor))
    _print(console, f"{out / 'results.json'}  {out / 'demo.png'}")
    _print(console, f"tensorboard --logdir {out / 'tensorboard'}")
    if stopped:
        _print(
            console, f"Stopped after the last complete epoch. Continue with: lightning-turbo demo --resume --out {out}"
        )
        return
    for level, row in rows.items():
        if not row["passed"]:
            advice = "More epochs may help: --resume --epochs N."
            _print(console, f"{level}: expected an accuracy of {floor}, got {row['val_accuracy']}. {advice}")


def _print(console: Console, line: str) -> None:
    """Print a line without markup, because a folder may look like markup."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)
