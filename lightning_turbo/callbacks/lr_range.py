"""Smith's learning rate range test with Lightning's learning rate finder."""

from __future__ import annotations

from typing import Any, Literal

from lightning_turbo._checks import check_choice, expect, is_number
from lightning_turbo._lightning import LightningDataModule, LightningModule, Trainer, Tuner, check_binding
from lightning_turbo.optim.lr_range import LRRange, propose_lr_range

__all__ = ["lr_range"]


def lr_range(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    *,
    min_lr: float = 1e-6,
    max_lr: float = 1.0,
    num_training: int = 100,
    mode: Literal["exponential", "linear"] = "exponential",
    early_stop_threshold: float | None = 4.0,
) -> LRRange:
    """Train a few steps with a rising learning rate and propose the limits of a cycle.

    Lightning's finder runs the steps and restores the model afterwards. ``propose_lr_range`` reads the limits from its
    loss curve.

    Args:
        trainer: A Trainer that has not run ``fit`` yet.
        model: The module. Its learning rate does not change.
        train_dataloaders: As in ``Trainer.fit``.
        datamodule: As in ``Trainer.fit``.
        min_lr: First learning rate, above 0.
        max_lr: Last learning rate, above ``min_lr``.
        num_training: Number of optimizer steps, at least 5.
        mode: Rise of the learning rate: ``"exponential"``, or ``"linear"`` as in the paper.
        early_stop_threshold: Ratio of the loss to the best loss that stops the test, above 0; ``None`` never stops it
            early.

    Returns:
        ``base_lr`` and ``max_lr`` for ``cyclic_lr``, and the curve.

    Raises:
        TypeError: If ``trainer`` is not a Trainer.
        ValueError: If a limit is out of range, or the curve has fewer than 5 finite losses or never falls.

    Note:
        The finder writes a temporary checkpoint into the Trainer's ``default_root_dir``.

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3.
    """
    check_binding("lr_range")
    expect(isinstance(trainer, Trainer), "lr_range(trainer)", trainer, "a Trainer", TypeError)
    valid = is_number(min_lr) and is_number(max_lr) and 0 < min_lr < max_lr
    expect(valid, "lr_range(min_lr, max_lr)", (min_lr, max_lr), "0 < min_lr < max_lr")
    check_choice("lr_range(mode)", mode, ("exponential", "linear"))
    # Lightning's running mean also counts earlier steps of the Trainer; see _correct_bias.
    before = trainer.global_step
    finder = Tuner(trainer).lr_find(
        model,
        train_dataloaders=train_dataloaders,
        datamodule=datamodule,
        min_lr=min_lr,
        max_lr=max_lr,
        num_training=num_training,
        mode=mode,
        early_stop_threshold=early_stop_threshold,
        update_attr=False,
    )
    if finder is None:
        raise ValueError("lr_range(trainer): expected a Trainer without fast_dev_run, which skips Lightning's finder.")
    losses = _correct_bias(finder.results["loss"], before)
    return propose_lr_range(finder.results["lr"][: len(losses)], losses)


def _correct_bias(losses: list[float], steps_before: int, beta: float = 0.98) -> list[float]:
    """Correct the running mean of Lightning's finder.

    The finder divides by ``1 - beta ** (step + 1)``, but its step already includes the current one, so the first
    entries are too small: by a half, a third, a quarter.
    """
    return [loss * (1 - beta ** (steps_before + count + 1)) / (1 - beta**count) for count, loss in enumerate(losses, 1)]
