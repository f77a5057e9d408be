"""The lean parts of the turbo strategies: Lightning's loop, hooks and logging with direct calls, for one run.

Nothing is patched. Subclasses of Lightning's own classes are set on one Trainer when it is set up to fit, and taken off
when it is torn down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lightning_turbo._lightning import (
    AutomaticOptimization,
    LightningModule,
    MixedPrecision,
    Precision,
    Strategy,
    TrainingEpochLoop,
    rank_zero_info,
)
from lightning_turbo.strategies.calls import call_callbacks, call_hook, inherits, is_unprofiled
from lightning_turbo.strategies.lean_logging import LeanLoggerConnector, LeanResults
from lightning_turbo.strategies.lean_loop import LeanEpochLoop, LeanSignalConnector

__all__ = ["LeanStrategy", "install"]

_BEFORE_BACKWARD, _AFTER_BACKWARD = ("pre_backward",), ("post_backward",)
_CLIP = "clip_gradients", "configure_gradient_clipping"
_AROUND_STEP = ("optimizer_step", "_wrap_closure", "_after_closure", "_clip_gradients")


def install(trainer: Any, *, step: bool, logging: bool, sigterm_every: int) -> Callable[[], None]:
    """Set the parts on a Trainer that is about to fit; a loop that is not Lightning's own stays, which the log says.

    Args:
        trainer: With its strategy set up; no loop runs yet.
        step: Call the hooks of a training step directly.
        logging: Keep logged values where they are until somebody reads them.
        sigterm_every: Batches between two agreements of the ranks on signals; 1 leaves them to Lightning.

    Returns:
        What puts everything back; to be called once.
    """
    fit_loop, connector, signals = trainer.fit_loop, trainer._logger_connector, trainer._signal_connector
    loop = fit_loop.epoch_loop
    results = loop._results
    if step or sigterm_every > 1:
        own = {TrainingEpochLoop: loop, AutomaticOptimization: loop.automatic_optimization}
        others = [type(part).__name__ for stock, part in own.items() if type(part) is not stock]
        if others:
            asked = ["lean_step"] * step + ["sigterm_every"] * (sigterm_every > 1)
            rank_zero_info(
                f"turbo: {' and '.join(asked)} set aside, because {' and '.join(others)} takes the place of "
                "Lightning's training loop."
            )
            step, sigterm_every = False, 1
    trainer.strategy.direct = step and is_unprofiled(trainer)
    if step or sigterm_every > 1:
        fit_loop.epoch_loop = LeanEpochLoop(loop, step, sigterm_every)
    if sigterm_every > 1:
        trainer._signal_connector = LeanSignalConnector(signals)
    if logging:
        loop._results = LeanResults(results)
        trainer._logger_connector = LeanLoggerConnector(connector)

    def put_back() -> None:
        trainer.strategy.direct = False
        fit_loop.epoch_loop = loop
        trainer._signal_connector = signals
        if logging:
            trainer._logger_connector.pass_on()
            trainer._logger_connector.convert()
            trainer._logger_connector = connector
            results.update(loop._results)
            loop._results = results

    return put_back


def _is_plain(plugin: Any, names: tuple[str, ...]) -> bool:
    """Whether a precision plugin does in these methods what Lightning's base class does."""
    unscaled = type(plugin) is MixedPrecision and plugin.scaler is None
    return inherits(plugin, MixedPrecision if unscaled else Precision, names)


class LeanStrategy(Strategy):
    """Between Lightning's strategies and their base: the same calls, direct ones while ``direct`` is set."""

    direct = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass between its hooks."""
        plugin, module = self.precision_plugin, self.lightning_module
        if not self.direct or module is None or not _is_plain(plugin, _BEFORE_BACKWARD):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        trainer = module.trainer
        self.pre_backward(closure_loss)
        call_callbacks(trainer, module, "on_before_backward", closure_loss)
        call_hook(module, module, "on_before_backward", closure_loss)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if _is_plain(plugin, _AFTER_BACKWARD):
            closure_loss = closure_loss.detach()
            call_callbacks(trainer, module, "on_after_backward")
            call_hook(module, module, "on_after_backward")
        else:
            closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, which runs the closure."""
        if not self.direct or not _is_plain(self.precision_plugin, _AROUND_STEP):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        wrapped = partial(self._step_and_clip, model or self.lightning_module, optimizer, closure)
        return optimizer.step(closure=wrapped, **kwargs)

    def _step_and_clip(self, module: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
        result = closure()
        trainer = module.trainer
        call_callbacks(trainer, module, "on_before_optimizer_step", optimizer)
        call_hook(module, module, "on_before_optimizer_step", optimizer)
        if module.automatic_optimization and not self._clips_nothing(module):
            clip = {
                "gradient_clip_val": trainer.gradient_clip_val,
                "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            }
            call_hook(module, module, "configure_gradient_clipping", optimizer, **clip)
        return result

    def _clips_nothing(self, module: Any) -> bool:
        """Whether no clipping was asked for, and nobody overrides what Lightning calls even then."""
        trainer = module.trainer
        return (
            trainer.gradient_clip_val is None
            and trainer.gradient_clip_algorithm is None
            and inherits(module, LightningModule, _CLIP)
            and _is_plain(self.precision_plugin, _CLIP[:1])
        )
