"""``Trainer(strategy="turbo_ddp")``: Lightning's DDP with the techniques around the step on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_turbo._checks import check_choice, check_count, check_switches
from lightning_turbo._distributed import rank_and_size
from lightning_turbo._lightning import DDPStrategy, MisconfigurationException, check_lean
from lightning_turbo.plugins.apex_amp import ApexAMP
from lightning_turbo.strategies.lean import LeanStrategy
from lightning_turbo.strategies.turbo import TurboParts

__all__ = ["TurboDDPStrategy", "compare_settings", "read_settings"]

_COMPRESS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
# Attributes of the Trainer and the strategy that decide how many steps there are, and when ranks wait for each other.
_TRAINER = (
    "accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm", "gradient_clip_val",
    "limit_train_batches", "limit_val_batches", "log_every_n_steps", "max_epochs", "max_steps", "min_epochs",
    "min_steps", "num_sanity_val_steps", "overfit_batches", "val_check_interval",
)  # fmt: skip
_STRATEGY = ("static_graph", "grad_compression", "sigterm_every", "compile", "_ddp_kwargs")


class TurboDDPStrategy(TurboParts, DDPStrategy, LeanStrategy):
    """Lightning's DDP with the techniques around the step switched on: ``strategy="turbo_ddp"``.

    Has all parts of ``TurboStrategy``, and those below. Start it with torchrun or Lightning's launcher, as ``"ddp"``.

    Args:
        *args: As in Lightning's ``DDPStrategy``.
        gradient_as_bucket_view: Keep gradients in DDP's buckets: one copy less.
        static_graph: Every step uses the same parameters in the same way; torch checks it once. Not with accumulated
            gradients.
        grad_compression: ``"bf16"`` (CUDA) or ``"fp16"``: send half the bytes, rounded. Not with ``ddp_comm_hook``.
        sigterm_every: Number of batches between two agreements of the ranks on signals, at least 1. Above 1 (Lightning
            2.6), all ranks stop at SIGTERM, or save and requeue the job at Slurm's signal, after the same batch. Off
            where the Trainer's loop or automatic optimization is not Lightning's own.
        **kwargs: As in ``TurboStrategy`` and in Lightning's ``DDPStrategy``.

    Raises:
        ValueError: If an argument has none of the values above.
        TypeError: If a switch is not a bool or a number not an integer.
        LightningMismatchError: If a lean part is ``True`` and Lightning is not 2.6.

    Example:
        >>> from lightning_turbo.strategies import TurboDDPStrategy
        >>> TurboDDPStrategy(grad_compression="bf16").grad_compression
        'bf16'
    """

    strategy_name = "turbo_ddp"

    def __init__(
        self,
        *args: Any,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        grad_compression: Literal["bf16", "fp16"] | None = None,
        sigterm_every: int = 1,
        **kwargs: Any,
    ) -> None:
        check_choice("grad_compression", grad_compression, (None, *_COMPRESS))
        check_switches(gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph)
        check_count("sigterm_every", sigterm_every)
        if sigterm_every > 1:
            check_lean(f"sigterm_every={sigterm_every}")
        super().__init__(*args, gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph, **kwargs)
        if grad_compression is not None and self._ddp_comm_hook is not None:
            raise ValueError(
                f"Pass either grad_compression or ddp_comm_hook: got both, grad_compression={grad_compression!r} and "
                f"ddp_comm_hook={self._ddp_comm_hook!r}. Wrap the hook with "
                "ddp_comm_wrapper=default_hooks.bf16_compress_wrapper of torch.distributed instead."
            )
        self.static_graph = static_graph
        self.grad_compression = grad_compression
        self.sigterm_every = sigterm_every

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, with the parts before and after.

        Raises:
            MisconfigurationException: If ranks have different settings, or for bfloat16 compression without CUDA.
        """
        _check_agreement(self, trainer)
        if self.grad_compression == "bf16" and self.root_device.type != "cuda":
            raise MisconfigurationException(
                f"grad_compression='bf16': expected CUDA with NCCL, got {self.root_device}. Pass 'fp16' or None."
            )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Wrap the module in DDP, and register the hook for ``grad_compression``."""
        super().configure_ddp()
        if self.grad_compression is not None and isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, _COMPRESS[self.grad_compression])

    def on_train_start(self) -> None:
        """Refuse a static graph with accumulated gradients.

        Raises:
            MisconfigurationException: If both are set, which torch does not support.
        """
        super().on_train_start()
        trainer: Any = self.lightning_module.trainer  # pyright: ignore[reportOptionalMemberAccess]
        if self.static_graph and trainer.accumulate_grad_batches > 1:
            raise MisconfigurationException(
                f"expected accumulate_grad_batches=1 with static_graph=True, got {trainer.accumulate_grad_batches}: "
                "DDP records a static graph in a backward pass that it synchronises. Leave one of them out."
            )


def _check_agreement(strategy: Any, trainer: Any) -> None:
    """Refuse ranks with different settings; a collective call, once a run.

    Raises:
        MisconfigurationException: On every rank, with the name and the values of each setting that differs.
    """
    size = rank_and_size()[1]
    if size == 1:
        return
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, read_settings(strategy, trainer))
    if differing := compare_settings(gathered):
        raise MisconfigurationException(
            f"expected the same settings on all ranks, got different settings: {'; '.join(differing)}. Start every "
            "machine with the same command, files and packages."
        )


def read_settings(strategy: Any, trainer: Any) -> dict[str, str]:
    """Return the settings that must be the same on all ranks: name -> value as text, without memory addresses."""
    precision, module = strategy.precision_plugin, trainer.lightning_module
    settings: dict[str, Any] = {name: getattr(trainer, name, None) for name in _TRAINER}
    settings.update({name.strip("_"): getattr(strategy, name, None) for name in _STRATEGY})
    settings["precision plugin"] = type(precision).__name__
    settings["precision"] = precision.precision
    if isinstance(precision, ApexAMP):
        settings.update(opt_level=precision.opt_level, **precision._settings)
    parameters = list(module.parameters())
    settings["parameters"] = (len(parameters), sum(p.numel() for p in parameters))
    settings["parameters that train"] = sum(p.requires_grad for p in parameters)
    # Machines may have different folders, but each has to find the checkpoint.
    settings["checkpoint to resume from"] = trainer.ckpt_path and Path(trainer.ckpt_path).name
    settings["torch"] = str(torch.__version__)
    return {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in settings.items()}


def compare_settings(gathered: Sequence[dict[str, str]]) -> list[str]:
    """Return a text for each setting that differs between ranks: its name, and each value with its ranks."""
    texts = []
    for name in dict.fromkeys(chain.from_iterable(gathered)):
        ranks: dict[str, list[int]] = {}
        for rank, settings in enumerate(gathered):
            ranks.setdefault(settings.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            texts.append(f"{name}: " + ", ".join(f"{value} on {_name_ranks(who)}" for value, who in ranks.items()))
    return texts


def _name_ranks(ranks: list[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"
