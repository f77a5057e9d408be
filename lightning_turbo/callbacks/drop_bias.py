"""Callback that removes the biases before batch and instance norm."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from lightning_turbo._checks import expect
from lightning_turbo._lightning import Callback, LightningModule, check_binding, rank_zero_info
from lightning_turbo._trainer import callbacks_named
from lightning_turbo.nn.bias import NORMS, BiasReport, drop_bias_before_norm

__all__ = ["DropBiasBeforeNorm"]


class DropBiasBeforeNorm(Callback):
    """Remove the bias of each convolution directly before a batch or instance norm, before the optimizer is made.

    The callback calls ``lightning_turbo.drop_bias_before_norm`` in ``setup`` of every stage, so that testing loads the
    checkpoints of training. The attribute ``report`` holds the result.

    Args:
        network: Path of the submodule to trace, for example ``"net"``. Default: the whole module; where it has no
            ``forward`` of its own, the one child that has norms.

    Raises:
        TypeError: If ``network`` is not a string.
        ValueError: In ``setup``, if the module has no such submodule, the submodule cannot be traced, or a callback
            before this one averages weights.

    Warns:
        NoEffectWarning: If there is no bias to drop.

    Note:
        Layers made in ``configure_model`` do not exist yet in ``setup``: call the function there instead. A copy
        of the network in the same module, such as a momentum encoder, keeps its biases: call the function before the
        copy is made. A checkpoint that was written without this callback is an error in ``ckpt_path``: load its
        weights before, as by ``load_from_checkpoint``.

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
        """Drop the biases once for each module."""
        # Lightning calls setup again before it validates or tests.
        if self._done is pl_module:
            return
        self._check_order(trainer.callbacks)
        self.report = drop_bias_before_norm(self._find_network(pl_module))
        self._done = pl_module
        rank_zero_info(f"DropBiasBeforeNorm: {self.report}")

    def _check_order(self, callbacks: list[Any]) -> None:
        """Refuse a callback that has already copied the module with its biases.

        Such a copy has more parameters, and torch pairs the two lists by their places without a word.
        """
        averaging = callbacks_named("StochasticWeightAveraging", "WeightAveraging")
        for callback in takewhile(lambda each: each is not self, callbacks):
            if isinstance(callback, averaging):
                name = type(callback).__name__
                raise ValueError(
                    f"callbacks: expected DropBiasBeforeNorm before {name}, which copies the module with its biases, "
                    f"got it after {name}. Change their order."
                )

    def _find_network(self, pl_module: LightningModule) -> Any:
        if self.network is None and type(pl_module).forward is LightningModule.forward:
            return self._find_child(pl_module)
        try:
            return pl_module.get_submodule(self.network or "")
        except AttributeError as error:
            children = [name for name, _ in pl_module.named_children()]
            raise ValueError(
                f"DropBiasBeforeNorm(network): expected a submodule of {type(pl_module).__name__}, for example one of "
                f"{children}, got {self.network!r}."
            ) from error

    def _find_child(self, pl_module: LightningModule) -> Any:
        """Return the child to trace of a module that has no forward, whose training step calls the child."""
        children = dict(pl_module.named_children())
        found = [name for name, child in children.items() if any(isinstance(part, NORMS) for part in child.modules())]
        if len(found) != 1:
            raise ValueError(
                f"DropBiasBeforeNorm(network): expected the name of a child, for example one of "
                f"{found or list(children)}, because {type(pl_module).__name__} has no forward to trace, got None."
            )
        return children[found[0]]
