"""Ranks that were started with different settings are told apart before the first step, with every value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_turbo._lightning import MisconfigurationException

__all__ = ["check_agreement", "disagreements", "settings_of"]

# What of the Trainer decides how many steps there are, and when ranks wait for one another.
TRAINER = (
    "accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm", "gradient_clip_val",
    "limit_train_batches", "limit_val_batches", "log_every_n_steps", "max_epochs", "max_steps", "min_epochs",
    "min_steps", "num_sanity_val_steps", "overfit_batches", "val_check_interval",
)  # fmt: skip
STRATEGY = ("static_graph", "grad_compression", "sync_batchnorm", "_ddp_kwargs")


def check_agreement(strategy: Any, trainer: Any) -> None:
    """Compare what the ranks were started with; with one rank there is nothing to compare.

    Args:
        strategy: A distributed strategy that is being set up.
        trainer: Its Trainer.

    Raises:
        MisconfigurationException: On every rank, if a setting is not the same on all; names each with its values.

    Note:
        A collective call, once a run.
    """
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()) or group.get_world_size() == 1:
        return
    gathered: list[Any] = [None] * group.get_world_size()
    group.all_gather_object(gathered, settings_of(strategy, trainer))
    differing = disagreements(gathered)
    if differing:
        raise MisconfigurationException(
            "The ranks were started with different settings: "
            + "; ".join(differing)
            + ". Accepted is one value on all ranks. Start every machine with the same command, files and packages."
        )


def settings_of(strategy: Any, trainer: Any) -> dict[str, str]:
    """Return what has to be the same on all ranks, by name, each value as text, without addresses in memory."""
    precision, module = strategy.precision_plugin, trainer.lightning_module
    settings: dict[str, Any] = {name: getattr(trainer, name, None) for name in TRAINER}
    settings.update({name.strip("_"): getattr(strategy, name, None) for name in STRATEGY})
    settings["precision plugin"] = type(precision).__name__
    settings["precision"] = precision.precision
    settings["opt_level"] = getattr(precision, "opt_level", None)
    settings.update(getattr(precision, "_settings", {}))  # ApexAMP's overrides
    parameters = list(module.parameters())
    settings["parameters"] = (len(parameters), sum(p.numel() for p in parameters))
    settings["parameters that train"] = sum(p.requires_grad for p in parameters)
    # Folders may differ from machine to machine; that one of them found no checkpoint may not.
    settings["checkpoint to go on from"] = trainer.ckpt_path and Path(trainer.ckpt_path).name
    settings["torch"] = str(torch.__version__)
    return {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in settings.items()}


def disagreements(gathered: Sequence[dict[str, str]]) -> list[str]:
    """Return one text for each setting that differs: its name, and each value with the ranks that have it.

    Args:
        gathered: The settings of each rank, in the order of ranks.
    """
    texts = []
    for name in dict.fromkeys(name for settings in gathered for name in settings):
        ranks: dict[str, list[int]] = {}
        for rank, settings in enumerate(gathered):
            ranks.setdefault(settings.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            texts.append(f"{name}: " + ", ".join(f"{value} on {_spelled(who)}" for value, who in ranks.items()))
    return texts


def _spelled(ranks: list[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"
