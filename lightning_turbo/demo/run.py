"""Run of the demo: levels on digits, then stock Lightning beside what tune found on volumes; each pair in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import runpy
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, TextIO

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_turbo._checks import expect
from lightning_turbo._lightning import ModelCheckpoint, Trainer, bound_name
from lightning_turbo.demo import data as demo_data
from lightning_turbo.demo.data import DemoData
from lightning_turbo.demo.figure import draw_results
from lightning_turbo.demo.history import RunHistory
from lightning_turbo.demo.model import DemoNet
from lightning_turbo.demo.report import FLOOR, compare_volumes, make_row, print_results
from lightning_turbo.demo.search import tune_script
from lightning_turbo.demo.settings import DemoError, DemoSettings
from lightning_turbo.measure import Progress, Work, describe_machine, print_lines, why_no_picture, write_json
from lightning_turbo.plugins.apex_amp import ApexAMP
from lightning_turbo.plugins.checkpoint_io import AtomicCheckpointIO

__all__ = ["run_demo", "train_in_turns"]

PASSED, TOO_LOW, INTERRUPTED = 0, 1, 130
VOLUME_EPOCHS = 6

Arguments = Callable[[list[Any]], dict[str, Any]]  # from callbacks to the arguments of a Trainer


def run_demo(settings: DemoSettings, stream: TextIO | None = None) -> int:
    """Train both parts, and write results.json, the files of tune and, with matplotlib, a picture.

    Args:
        settings: The settings. The run replaces the results in ``settings.out``.
        stream: Output of progress and tables. Default: standard output.

    Returns:
        Exit status: 0 if every level reaches its accuracy, 1 if one does not, 130 after Ctrl-C. Speed has no effect.

    Raises:
        DemoError: If the device is absent, or ``out`` cannot be written.
        MissingExtraError: If a package of the ``demo`` extra is not installed.
        OSError: If a file cannot be written during training, for example because the disk is full.

    Note:
        What is compared takes turns epoch by epoch, so that a temporary load on the machine slows all of it. The
        results are a demonstration, not a benchmark.
    """
    stream = stream or sys.stdout
    device = _device(settings.device)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"out: expected a folder that can be written, got {str(settings.out)!r} ({error.strerror})."
        ) from error
    results: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(device.type),
        "settings": {"levels": list(settings.levels), "epochs": settings.epochs, "seed": settings.seed},
        "floor": FLOOR,
        "levels": {},
        "volumes": None,
    }
    stopped = False
    with _quiet_lightning(), _one_thread(), Progress(stream=stream) as progress:
        try:
            _train_levels(settings, device, progress, results["levels"])
            if settings.tune_seconds:
                results["volumes"] = _train_volumes(settings, device, progress)
        except KeyboardInterrupt:
            stopped = True
    write_json(results, settings.out / "results.json")
    picture = settings.out / "demo.png"
    picture.unlink(missing_ok=True)  # of an earlier run
    if not why_no_picture():
        draw_results(results, picture)
    print_results(results, stream)
    print_lines(str(settings.out / "results.json"), why_no_picture() or str(picture), stream=stream)
    if stopped:
        print_lines("Stopped after the last complete epoch; the results hold what was complete.", stream=stream)
        return INTERRUPTED
    failed = {level: row["val_accuracy"] for level, row in results["levels"].items() if not row["passed"]}
    for level, accuracy in failed.items():
        why = f"{level}: expected an accuracy of {FLOOR}, got {accuracy}. More epochs may help: --epochs N."
        print_lines(why, stream=stream)
    return TOO_LOW if failed else PASSED


def _train_levels(settings: DemoSettings, device: torch.device, progress: Progress, rows: dict[str, Any]) -> None:
    """Train the levels on digits; the rows are there after Ctrl-C as well."""
    data = demo_data.load_digits(settings.seed)

    def arguments(level: str) -> Arguments:
        return lambda callbacks: {"callbacks": callbacks, "plugins": [ApexAMP(level)]}

    histories = {level: RunHistory(samples=len(data.train)) for level in settings.levels}
    levels = {level: arguments(level) for level in settings.levels}
    try:
        train_in_turns(levels, data, histories, progress, settings, settings.epochs, device)
    finally:
        rows.update({level: make_row(history, settings.epochs, FLOOR) for level, history in histories.items()})


def _train_volumes(settings: DemoSettings, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Write the volumes, tune a script that trains on them, and train with and without what helped."""
    from lightning_turbo.demo import volumes

    data = demo_data.load_mni()
    folder = settings.out / "volumes"
    progress.say(f"volumes: {len(data.train)} compressed files in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    files = volumes.write_volumes(data.train, folder)
    program = [volumes.__file__, str(folder), device.type]
    progress.show("tune")
    found = tune_script(
        program, settings.out / "tune", seed=settings.seed, seconds=settings.tune_seconds, say=progress.say
    )
    turbo = runpy.run_path(str(settings.out / "tune" / "turbo.py"))["turbo"]
    compressed = dataclasses.replace(data, train=files)
    histories = {name: RunHistory(samples=len(files)) for name in ("stock", "tuned")}
    trainers: dict[str, Arguments] = {"stock": lambda callbacks: {"callbacks": callbacks}, "tuned": turbo}
    train_in_turns(trainers, compressed, histories, progress, settings, VOLUME_EPOCHS, device)
    rows = {name: make_row(history, VOLUME_EPOCHS) for name, history in histories.items()}
    return compare_volumes(rows, found["chosen"])


def train_in_turns(
    trainers: Mapping[str, Arguments],
    data: DemoData,
    histories: Mapping[str, RunHistory],
    progress: Progress,
    settings: DemoSettings,
    epochs: int,
    device: torch.device,
) -> None:
    """Train each of some trainers by an epoch in turn.

    Args:
        trainers: Name -> the arguments of its Trainer.
        data: The task.
        histories: Name -> its record, which the run adds to.
        progress: Shows every epoch.
        settings: Seed and folder.
        epochs: Of each.
        device: Where to train.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once Lightning has closed everything.
    """
    progress.expect([Work(0, epochs * len(trainers), math.inf)])
    for epoch in range(1, epochs + 1):
        for name, arguments in trainers.items():
            title = f"{name}  epoch {epoch:>2}/{epochs}"
            progress.show(title)
            _train_epoch(name, arguments, data, histories[name], settings, epoch, epochs, device)
            progress.advance("rounds")
            progress.say(f"{title}  validation accuracy {histories[name].val_accuracies[-1]:.3f}")


def _train_epoch(
    name: str,
    arguments: Arguments,
    data: DemoData,
    history: RunHistory,
    settings: DemoSettings,
    epoch: int,
    epochs: int,
    device: torch.device,
) -> None:
    """Train up to an epoch, from the checkpoint of the epoch before."""
    checkpoint = settings.out / "checkpoints" / f"{name}.ckpt"
    torch.manual_seed(settings.seed)
    # This sampler shuffles by seed and epoch alone, so that all see the samples in the same order.
    order: DistributedSampler[Any] = DistributedSampler(
        data.train, num_replicas=1, rank=0, shuffle=True, seed=settings.seed
    )
    saver = ModelCheckpoint(
        dirpath=checkpoint.parent, filename=name, save_on_train_epoch_end=True, enable_version_counter=False
    )
    chosen = arguments([history, saver])
    trainer = Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        max_epochs=epoch,
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**chosen, "plugins": [*chosen.get("plugins", []), AtomicCheckpointIO()]},
    )
    steps = epochs * math.ceil(len(data.train) / data.batch_size)
    with _interruptible(trainer):
        trainer.fit(
            DemoNet(dims=data.dims, classes=data.classes, total_steps=steps),
            DataLoader(data.train, data.batch_size, sampler=order),
            DataLoader(data.val, 256 if data.dims == 2 else 32),
            ckpt_path=checkpoint if epoch > 1 else None,
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


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Suppress messages of Lightning that do not concern a user of the demo."""
    fabric = "lightning.fabric" if bound_name() == "lightning.pytorch" else "lightning_fabric"
    loggers = {name: logging.getLogger(name) for name in (bound_name(), fabric)}
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            warnings.filterwarnings("ignore", ".*but have no `val_dataloader`.*")  # tune validates nothing
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.. is deprecated.*")  # Lightning's own
            warnings.filterwarnings("ignore", ".*Checkpoint directory .* exists and is not empty.*")
            yield
    finally:
        for name, level in levels.items():
            loggers[name].setLevel(level)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: more would wait for each other on layers this small, and the others are for loading."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
