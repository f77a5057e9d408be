"""The demo itself: train every level, keep what was done, report."""

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

__all__ = ["BATCH_SIZE", "run_demo", "train_level"]

BATCH_SIZE = 32
PASSED, TOO_LOW, INTERRUPTED = 0, 1, 130


def run_demo(settings: DemoSettings, console: Console | None = None) -> int:
    """Train a small network at each level, and write results.json, a picture, logs and checkpoints.

    Args:
        settings: What to do. ``settings.out`` is replaced level by level unless ``settings.resume``.
        console: Where progress and the table go; default standard output.

    Returns:
        Exit status: 0 if every level reached its accuracy, 1 if one did not, 130 after Ctrl-C.

    Raises:
        DemoError: If the device is absent, ``out`` cannot be written, or there is nothing to resume.
        MissingExtraError: If a package of the ``demo`` extra is not installed.
        OSError: If a file cannot be written later on, for example because the disk is full; what was there is kept.

    Note:
        The order of the levels in time can favour one of them; the figures are a demonstration, not a benchmark.
    """
    console = console or Console()
    device = _device(settings.device)
    out = settings.out
    results = _resumed(settings) if settings.resume else _fresh(settings)
    asked, rows = results["settings"], results["levels"]
    data = load_digits(asked["seed"]) if asked["data"] == "digits" else load_mni()
    with _threads(data):
        results["machine"] = machine(device)
    results |= {"floor": data.floor, "majority": data.majority}
    write_results(results, out / "results.json")

    epochs, levels = asked["epochs"], settings.levels or tuple(asked["levels"])
    steps = len(levels) * epochs * math.ceil(len(data.train) / BATCH_SIZE)
    console.print(
        f"{data.name}: {len(data.train)} training and {len(data.val)} validation samples, "
        f"{epochs} epochs at {', '.join(levels)} on {results['machine']['device']}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    status, stopped_in = PASSED, ""
    with _quiet_lightning(), _threads(data), RunProgress(console, steps=steps, epochs=epochs) as progress:
        for level in levels:
            history = RunHistory(samples=len(data.train))
            try:
                train_level(level, data, history, progress, epochs=epochs, seed=asked["seed"], device=device, out=out)
            except KeyboardInterrupt:
                status, stopped_in = INTERRUPTED, level
            rows[level] = level_row(history, epochs=epochs, floor=data.floor)
            write_results(results, out / "results.json")
            if status == INTERRUPTED:
                break
    draw_results(results, out / "demo.png")
    if status == PASSED and not all(row["passed"] for row in rows.values()):
        status = TOO_LOW
    _conclude(console, results, out, stopped_in)
    return status


def train_level(
    level: str,
    data: DemoData,
    history: RunHistory,
    progress: RunProgress,
    *,
    epochs: int,
    seed: int,
    device: torch.device,
    out: Path,
) -> None:
    """Train one level up to ``epochs``, from its checkpoint in ``out`` if there is one.

    Args:
        level: One of O0 to O3.
        data: The task.
        history: Filled with what happens, earlier epochs included.
        progress: Told of every step.
        epochs: Epochs in total.
        seed: Seeds the weights and the order of the samples.
        device: Where to train.
        out: Folder of checkpoints and logs.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once Lightning has closed everything.
        DemoError: If the level's checkpoint cannot be read.
    """
    checkpoint = _checkpoint(out, level)
    past = past_history(checkpoint) if checkpoint.is_file() else {}
    if past:
        history.load_state_dict(past)
    progress.begin(level, steps_done=min(history.epochs, epochs) * math.ceil(history.samples / BATCH_SIZE))
    if history.epochs >= epochs:
        return

    torch.manual_seed(seed)
    # This sampler shuffles by seed and epoch alone, so that a resumed run sees the samples in the same order.
    order: DistributedSampler[Any] = DistributedSampler(data.train, num_replicas=1, rank=0, shuffle=True, seed=seed)
    trainer = Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        plugins=[ApexAMP(level), AtomicCheckpointIO()],
        max_epochs=epochs,
        callbacks=[
            history,
            progress,
            ModelCheckpoint(
                dirpath=checkpoint.parent,
                filename=level,
                save_on_train_epoch_end=True,
                enable_version_counter=False,
            ),
        ],
        logger=TensorBoardLogger(out, name="tensorboard", version=level, default_hp_metric=False),
        log_every_n_steps=min(10, math.ceil(history.samples / BATCH_SIZE)),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(
            DemoNet(dims=data.dims, classes=data.classes),
            DataLoader(data.train, BATCH_SIZE, sampler=order),
            DataLoader(data.val, 256 if data.dims == 2 else BATCH_SIZE),
            ckpt_path=checkpoint if past else None,
        )
    except SystemExit:  # Lightning makes one of Ctrl-C, and turns the signal off
        if not trainer.interrupted:
            raise
        signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt from None


def _checkpoint(out: Path, level: str) -> Path:
    return out / "checkpoints" / f"{level}.ckpt"


def _device(name: str) -> torch.device:
    """The device that ``name`` means on this machine."""
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            raise DemoError(
                f"device {name!r}: torch finds {count} CUDA devices here; accepted are auto, cpu"
                f"{''.join(f', cuda:{index}' for index in range(count))}. Choose one of these."
            )
    return device


def _fresh(settings: DemoSettings) -> dict[str, Any]:
    """The results of a run that starts anew; what an earlier run left in the folder goes."""
    out = settings.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for level in LEVELS:
            _checkpoint(out, level).unlink(missing_ok=True)
            for events in (out / "tensorboard" / level).glob("events.out.tfevents.*"):
                events.unlink()
    except OSError as error:
        raise DemoError(
            f"out {str(out)!r}: {error.strerror or error}; accepted is a folder that can be made or written. "
            "Choose another one."
        ) from error
    data = settings.data or "digits"
    asked = {
        "levels": list(settings.levels or LEVELS),
        "epochs": settings.epochs or EPOCHS[data],
        "data": data,
        "seed": settings.seed or 0,
    }
    return {"format": FORMAT, "settings": asked, "levels": {}}


def _resumed(settings: DemoSettings) -> dict[str, Any]:
    """The results of the run that ``settings`` continue, with the new settings in place of the old."""
    path = settings.out / "results.json"
    try:
        results = json.loads(path.read_text())
        asked, rows, version = dict(results["settings"]), dict(results["levels"]), results["format"]
        used = {name: asked[name] for name in ("data", "seed", "epochs", "levels")} if version == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoError(
            f"resume from {str(path)!r}: it is not there or not readable ({error!r}); accepted is the folder of an "
            "earlier demo. Leave --resume out to start anew."
        ) from error
    if version != FORMAT:
        raise DemoError(
            f"resume from {str(path)!r}: its format is {version!r}; accepted is {FORMAT}. "
            "Leave --resume out to start anew."
        )
    for name in ("data", "seed"):
        value = getattr(settings, name)
        if value is not None and value != used[name]:
            raise DemoError(
                f"resume with {name} {value!r}: the earlier run used {used[name]!r}, and only that is accepted. "
                f"Leave {name} out, or leave --resume out to start anew."
            )
    wanted = {*used["levels"], *(settings.levels or ())}
    used |= {"levels": [level for level in LEVELS if level in wanted], "epochs": settings.epochs or used["epochs"]}
    return results | {"settings": used, "levels": {level: rows[level] for level in LEVELS if level in rows}}


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence Lightning's greetings and the warnings that say nothing to a user of the demo."""
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
    """One thread for digits: its layers are too small to share, and waiting for a busy core costs ten times more."""
    before = torch.get_num_threads()
    if data.name == "digits":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _conclude(console: Console, results: dict[str, Any], out: Path, stopped_in: str) -> None:
    """Print the table and what follows from it."""
    rows, floor = results["levels"], results["floor"]
    console.print(results_table(rows, floor))
    console.print(f"{out / 'results.json'}  {out / 'demo.png'}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"tensorboard --logdir {out / 'tensorboard'}", highlight=False, markup=False, soft_wrap=True)
    if stopped_in:
        console.print(
            f"Stopped in {stopped_in} after {rows[stopped_in]['epochs']} of {results['settings']['epochs']} epochs; "
            f"every whole epoch is kept. Continue with: lightning-turbo demo --resume --out {out}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return
    for level, row in rows.items():
        if not row["passed"]:
            console.print(
                f"[bold red]{level} stayed at {row['val_accuracy']}, below {floor}[/]; "
                "more epochs may help: --resume --epochs N continues.",
                highlight=False,
            )
