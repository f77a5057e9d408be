"""The callback that drops biases before batch norm, before the optimizer is made."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from lightning_turbo._checks import check_switches
from lightning_turbo._lightning import Callback, LightningModule, callbacks_named, check_binding, rank_zero_info
from lightning_turbo.nn.bias import BiasReport, drop_bias_before_norm

__all__ = ["DropBiasBeforeNorm"]


class DropBiasBeforeNorm(Callback):
    """Remove the biases that a following batch norm cancels, before the optimizer is made.

    See ``lightning_turbo.drop_bias_before_norm``, which does the work. It runs in ``setup`` of every stage, so that
    checkpoints of the smaller network fit in testing too; the report is in the attribute ``report``.

    Args:
        network: Path of the submodule to trace, for example ``"net"``; ``None`` traces the whole module.
        use_example_input: Whether to run ``example_input_array`` of the module through it, so that linear layers can
            be judged; only with ``network=None``.

    Raises:
        TypeError: If ``network`` is no string, or ``use_example_input`` no bool.
        ValueError: If both arguments are given; in ``setup``, if the module has no such submodule, it cannot be
            traced, or a callback before this one averages weights.

    Warns:
        NoEffectWarning: If there was nothing to drop.

    Note:
        Layers made in ``configure_model`` do not exist yet in ``setup``: call the function there instead. A network
        that stands beside a copy of itself, as a momentum encoder is, keeps its biases: call the function before the
        copy is made. Optimizer states saved before the biases were dropped count more parameters and cannot be loaded;
        weights can.

    Example:
        >>> from lightning_turbo import DropBiasBeforeNorm
        >>> callback = DropBiasBeforeNorm(network="net")
    """

    def __init__(self, network: str | None = None, use_example_input: bool = False) -> None:
        check_binding("DropBiasBeforeNorm")
        if network is not None and not isinstance(network, str):
            raise TypeError(f"DropBiasBeforeNorm(network={network!r}); accepted is a path such as 'net', or None.")
        check_switches(use_example_input=use_example_input)
        if network is not None and use_example_input:
            raise ValueError(
                f"DropBiasBeforeNorm(network={network!r}, use_example_input=True): example_input_array is the input of "
                "the whole module; accepted is one of the two. Leave network out."
            )
        self.network = network
        self.use_example_input = use_example_input
        self.report: BiasReport | None = None
        self._done: LightningModule | None = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Drop the biases, once for each module."""
        if self._done is pl_module:
            return
        for callback in takewhile(lambda callback: callback is not self, trainer.callbacks):
            if isinstance(callback, callbacks_named("StochasticWeightAveraging", "WeightAveraging")):
                name = type(callback).__name__
                raise ValueError(
                    f"DropBiasBeforeNorm stands after {name} in the Trainer's callbacks, which has copied the module "
                    f"with its biases already; accepted is the other order. Put it before {name}."
                )
        inputs: Any = None
        if self.use_example_input:
            inputs = pl_module.example_input_array
            if inputs is None:
                raise ValueError(
                    f"DropBiasBeforeNorm(use_example_input=True): {type(pl_module).__name__} has no "
                    "example_input_array. Set it, or leave use_example_input out."
                )
            inputs = inputs if isinstance(inputs, (tuple, list, dict)) else (inputs,)
        try:
            network = pl_module if self.network is None else pl_module.get_submodule(self.network)
        except AttributeError as error:
            raise ValueError(
                f"DropBiasBeforeNorm(network={self.network!r}): {type(pl_module).__name__} has no such submodule; "
                f"accepted are, for example, {[name for name, _ in pl_module.named_children()]}. Correct the path."
            ) from error
        self.report = drop_bias_before_norm(network, inputs, within=pl_module)
        self._done = pl_module
        rank_zero_info(f"DropBiasBeforeNorm: {self.report}")
