"""The callback that drops biases before batch and instance norm, before the optimizer is made."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from lightning_turbo._checks import expect
from lightning_turbo._lightning import Callback, LightningModule, callbacks_named, check_binding, rank_zero_info
from lightning_turbo.nn.bias import BiasReport, drop_bias_before_norm

__all__ = ["DropBiasBeforeNorm"]


class DropBiasBeforeNorm(Callback):
    """Remove the biases of convolutions that a following norm cancels, before the optimizer is made.

    See ``lightning_turbo.drop_bias_before_norm``, which does the work. It runs in ``setup`` of every stage, so that
    checkpoints of the smaller network fit in testing too; the report is in the attribute ``report``.

    Args:
        network: Path of the submodule to trace, for example ``"net"``; ``None`` traces the whole module.

    Raises:
        TypeError: If ``network`` is not a string.
        ValueError: In ``setup``, if the module has no such submodule, it cannot be traced, or a callback before this
            one averages weights.

    Warns:
        NoEffectWarning: If there was nothing to drop.

    Note:
        Layers made in ``configure_model`` do not exist yet in ``setup``: call the function there instead. A network
        beside a copy of itself, as a momentum encoder is, keeps its biases: call the function before the copy is made.
        Optimizer states saved before the biases were dropped count more parameters and cannot be loaded; weights can.

    Example:
        >>> from lightning_turbo import DropBiasBeforeNorm
        >>> callback = DropBiasBeforeNorm(network="net")
    """

    def __init__(self, network: str | None = None) -> None:
        check_binding("DropBiasBeforeNorm")
        valid = network is None or isinstance(network, str)
        expect(valid, "DropBiasBeforeNorm(network)", network, "a path such as 'net', or None", TypeError)
        self.network = network
        self.report: BiasReport | None = None
        self._done: LightningModule | None = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Drop the biases, once for each module."""
        if self._done is pl_module:
            return
        averaging = callbacks_named("StochasticWeightAveraging", "WeightAveraging")
        for callback in takewhile(lambda callback: callback is not self, trainer.callbacks):
            if isinstance(callback, averaging):
                name = type(callback).__name__
                raise ValueError(
                    f"DropBiasBeforeNorm comes after {name} in the Trainer's callbacks, which has copied the module "
                    f"with its biases already. Put it before {name}."
                )
        try:
            network = pl_module.get_submodule(self.network or "")
        except AttributeError as error:
            raise ValueError(
                f"DropBiasBeforeNorm(network={self.network!r}): {type(pl_module).__name__} has no such submodule; "
                f"expected a path such as one of {[name for name, _ in pl_module.named_children()]}."
            ) from error
        self.report = drop_bias_before_norm(network, within=pl_module)
        self._done = pl_module
        rank_zero_info(f"DropBiasBeforeNorm: {self.report}")
