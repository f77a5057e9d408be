"""Callback that removes biases before batch and instance norm."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from lightning_turbo._checks import expect
from lightning_turbo._lightning import Callback, LightningModule, check_binding, rank_zero_info
from lightning_turbo._trainer import callbacks_named
from lightning_turbo.nn.bias import NORMS, BiasReport, drop_bias_before_norm

__all__ = ["DropBiasBeforeNorm"]


class DropBiasBeforeNorm(Callback):
    """Remove the bias of each convolution directly before a batch or instance norm, before the optimizer is created.

    The callback calls ``lightning_turbo.drop_bias_before_norm`` in ``setup`` of every stage, so that testing can load
    the checkpoints of training. The attribute ``report`` holds the result.

    Args:
        network: Path of the submodule to trace, for example ``"net"``. Default: the whole module or, if it has no
            ``forward``, its only child with norms.

    Raises:
        TypeError: If ``network`` is not a string.
        ValueError: In ``setup``, if the module has no such submodule, the submodule cannot be traced, or an earlier
            callback averages weights.

    Warns:
        NoEffectWarning: If there is no bias to drop.

    Note:
        Layers created in ``configure_model`` do not exist in ``setup``: call the function there instead. A copy of the
        network in the same module, such as a momentum encoder, keeps its biases: call the function before making the
        copy. A checkpoint saved without this callback raises an error as ``ckpt_path``: load its weights first, for
        example with ``load_from_checkpoint``.

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
        """Remove the biases, once per module."""
        # Lightning calls setup again before it validates or tests.
        if self._done is pl_module:
            return
        self._check_order(trainer.callbacks)
        self.report = drop_bias_before_norm(self._find_network(pl_module))
        self._done = pl_module
        rank_zero_info(f"DropBiasBeforeNorm: {self.report}")

    def _check_order(self, callbacks: list[Any]) -> None:
        """Raise an error if an earlier callback has already copied the module with its biases.

        Such a copy has more parameters, and torch silently pairs the two parameter lists by position.
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
        """Return the child to trace for a module without a ``forward``, whose training step calls the child."""
        children = dict(pl_module.named_children())
        found = [name for name, child in children.items() if any(isinstance(part, NORMS) for part in child.modules())]
        if len(found) != 1:
            raise ValueError(
                f"DropBiasBeforeNorm(network): expected the name of a child, for example one of "
                f"{found or list(children)}, because {type(pl_module).__name__} has no forward to trace, got None."
            )
        return children[found[0]]
