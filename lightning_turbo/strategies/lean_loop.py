"""The lean loop: Lightning 2.6's loop over the batches of an epoch, with direct calls of its hooks.

Nothing is patched. ``install_lean`` sets subclasses of Lightning's classes on one Trainer for the duration of a fit.
``plan_lean`` decides once, before the first batch, what they may leave out. Each method names the Lightning method that
it follows.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._checks import inherits
from lightning_turbo._lightning import (
    AutomaticOptimization,
    ClosureResult,
    DataHooks,
    DataLoaderIterDataFetcher,
    LightningModule,
    LoggerConnector,
    MixedPrecision,
    PassThroughProfiler,
    Precision,
    ResultCollection,
    ResultMetric,
    Strategy,
    TrainingEpochLoop,
    move_data_to_device,
)
from lightning_turbo._trainer import takes_batch_index

__all__ = ["LeanStrategy", "find_custom_loops", "install_lean", "is_unprofiled"]

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_CLIP = "clip_gradients", "configure_gradient_clipping"
_AROUND_STEP = ("optimizer_step", "_wrap_closure", "_after_closure", "_clip_gradients")


class LeanPlan(NamedTuple):
    """What the lean step may leave out of a run because nothing overrides it."""

    transfer: bool  # the hooks around the transfer of a batch to the device
    batch_index: bool  # the batch index as an argument of `training_step`
    zero_grad: bool  # clearing gradients that are all None
    backward: bool  # the precision plugin's work before and after backward
    step: bool  # the precision plugin's work around the optimizer's step
    clip: bool  # the hook for clipping, if the Trainer has no clipping value


def plan_lean(trainer: Any) -> LeanPlan:
    """Decide what the lean step may leave out in a run; methods replaced later in the run are not noticed."""
    strategy = trainer.strategy
    module = trainer.lightning_module
    plugin = strategy.precision_plugin
    movers = [module] if trainer.datamodule is None else [module, trainer.datamodule]
    return LeanPlan(
        transfer=all(inherits(mover, DataHooks, _TRANSFER) for mover in movers)
        and inherits(strategy, Strategy, ("batch_to_device",)),
        batch_index=not takes_batch_index(module.training_step),
        zero_grad=inherits(module, LightningModule, ("optimizer_zero_grad",))
        and all(
            isinstance(each, Optimizer) and inherits(each, Optimizer, ("zero_grad",)) for each in trainer.optimizers
        ),
        backward=_is_plain(plugin, ("pre_backward", "post_backward")),
        step=_is_plain(plugin, _AROUND_STEP),
        clip=inherits(module, LightningModule, _CLIP) and _is_plain(plugin, _CLIP[:1]),
    )


def _is_plain(plugin: Any, names: tuple[str, ...]) -> bool:
    """Return whether these methods of a precision plugin do no more than those of Lightning's base class.

    Those of ``MixedPrecision`` only do more with a scaler.
    """
    unscaled = type(plugin) is MixedPrecision and plugin.scaler is None
    return inherits(plugin, MixedPrecision if unscaled else Precision, names)


def find_custom_loops(trainer: Any) -> list[str]:
    """Return the class names of a Trainer's training loops that are not Lightning's own."""
    loop = trainer.fit_loop.epoch_loop
    own = {TrainingEpochLoop: loop, AutomaticOptimization: loop.automatic_optimization}
    return [type(part).__name__ for stock, part in own.items() if type(part) is not stock]


def is_unprofiled(trainer: Any) -> bool:
    """Return whether the Trainer's profiler is the one that does nothing."""
    return type(trainer.profiler) is PassThroughProfiler


def is_heard(trainer: Any) -> bool:
    """Return whether something, such as the Doctor, is listening to the calls of the Trainer's profiler."""
    return "start" in vars(trainer.profiler)


class InPlaceOf:
    """Replaces one of Lightning's objects for the duration of a fit.

    Both share one ``__dict__``: their counters are the same, and checkpoints contain the same names. So these classes
    have no attributes of their own.
    """

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__


def install_lean(trainer: Any) -> Callable[[], None]:
    """Replace the loop and the logger connector of a Trainer with lean ones.

    They call the hooks of a training step directly, and keep logged values as tensors until they are read.

    Args:
        trainer: A Trainer whose strategy is set up and whose loops are Lightning's own and not running.

    Returns:
        A function that undoes the replacement; call it once.
    """
    undo = contextlib.ExitStack()
    loop = trainer.fit_loop.epoch_loop
    undo.callback(setattr, trainer.strategy, "lean_plan", None)
    _replace(undo, loop, "automatic_optimization", LeanOptimization(loop.automatic_optimization))
    _replace(undo, trainer.fit_loop, "epoch_loop", LeanEpochLoop(loop))
    stock = loop._results
    connector = trainer._logger_connector
    if type(connector) is LoggerConnector and type(stock) is ResultCollection:
        results = LeanResults(stock)
        connector = LeanLoggerConnector(connector)
        # Lightning's own collection is read after the run.
        undo.callback(stock.update, results)
        _replace(undo, loop, "_results", results)
        _replace(undo, trainer, "_logger_connector", connector)
        undo.callback(connector.convert)
    return undo.close


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


# Calls of hooks


def call_callbacks(trainer: Any, module: Any, hook: str, *args: Any) -> None:
    """Call a hook of every callback. Follows ``call._call_callback_hooks``."""
    state = vars(module)
    before = state["_current_fx_name"]
    state["_current_fx_name"] = hook
    for callback in trainer.callbacks:
        function = getattr(callback, hook)
        if callable(function):
            function(trainer, module, *args)
    state["_current_fx_name"] = before


def call_hook(owner: Any, module: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the module or the strategy, unless it is ``None``; ``self.log`` needs the hook's name.

    Follows ``call._call_lightning_module_hook`` and ``call._call_strategy_hook``.
    """
    state = vars(module)
    before = state["_current_fx_name"]
    state["_current_fx_name"] = hook
    function = getattr(owner, hook)
    output = function(*args, **kwargs) if callable(function) else None
    state["_current_fx_name"] = before
    return output


# A batch: the loop, the optimization, the strategy


class LeanEpochLoop(InPlaceOf, TrainingEpochLoop):
    """The loop over the batches of an epoch, with direct calls."""

    def advance(self, data_fetcher: Any) -> None:
        """Run a batch. Follows ``_TrainingEpochLoop.advance``, and calls it in cases that this method does not cover.

        Those are a resumed epoch, ``dataloader_iter``, and a profiler that was set during the run or is listened to.
        """
        trainer = self.trainer
        if not is_unprofiled(trainer) or is_heard(trainer):
            self._advance_profiled(data_fetcher)
            return
        if self._restarting or isinstance(data_fetcher, DataLoaderIterDataFetcher):
            super().advance(data_fetcher)
            return
        if self.val_loop._restarting:
            self.val_loop.restarting = False
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            self._broadcast_sigterm_tensor()
        batch, _, __ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        self.batch_progress.is_last_batch = data_fetcher.done
        batch = self._to_device(trainer.strategy.precision_plugin.convert_input(batch))
        self.batch_progress.increment_ready()
        self._begin_batch(trainer._logger_connector, batch)
        output, ends_epoch = self._train_on_batch(batch, batch_idx)
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends_epoch:
            raise StopIteration
        module = trainer.lightning_module
        call_callbacks(trainer, module, "on_train_batch_end", output, batch, batch_idx)
        call_hook(module, module, "on_train_batch_end", output, batch, batch_idx)
        self._end_batch(trainer._logger_connector)

    def _advance_profiled(self, data_fetcher: Any) -> None:
        """Run a batch with Lightning's own calls, each of which reports its name to the profiler.

        The Doctor listens to these names until its report.
        """
        strategy: Any = self.trainer.strategy
        lean = self.automatic_optimization, strategy.lean_plan
        self.automatic_optimization = AutomaticOptimization(self.trainer)
        strategy.lean_plan = None
        self.automatic_optimization.__dict__ = lean[0].__dict__
        try:
            super().advance(data_fetcher)
        finally:
            self.automatic_optimization, strategy.lean_plan = lean

    def _to_device(self, batch: Any) -> Any:
        """Move a batch. Follows ``LightningModule._apply_batch_transfer_handler``."""
        strategy: Any = self.trainer.strategy
        if not strategy.lean_plan.transfer:
            module = self.trainer.lightning_module
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            return call_hook(strategy, module, "batch_to_device", batch, dataloader_idx=0)
        device = strategy.root_device
        if type(batch) in (tuple, list) and all(type(x) is Tensor and x.device == device for x in batch):
            return type(batch)(batch)  # a new container, as returned by the move: a hook may change it
        return move_data_to_device(batch, device)

    def _begin_batch(self, connector: Any, batch: Any) -> None:
        """Start logging for a batch. Follows ``_LoggerConnector.on_batch_start``.

        The connector's own methods search for the running loop whenever they need its results: seven times per batch.
        """
        # The sequence None, True, False, False, ...: whether this is the first batch after a reset.
        connector._first_loop_iter = connector._first_loop_iter is None
        self._results.batch = batch
        self._results.batch_size = None
        self._results.dataloader_idx = None

    def _train_on_batch(self, batch: Any, batch_idx: int) -> tuple[Any, bool]:
        """Return the output of the step, and whether a hook ended the epoch before it.

        Follows the middle of ``_TrainingEpochLoop.advance``.
        """
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            return None, False
        trainer: Any = self.trainer
        strategy = trainer.strategy
        module = trainer.lightning_module
        call_callbacks(trainer, module, "on_train_batch_start", batch, batch_idx)
        ends_epoch = call_hook(module, module, "on_train_batch_start", batch, batch_idx) == -1
        call_hook(strategy, module, "on_train_batch_start", batch, batch_idx)
        if ends_epoch:
            self.batch_progress.increment_by(0, is_last_batch=True)
            return None, True
        self.batch_progress.increment_started()
        kwargs = (
            OrderedDict(batch=batch)
            if strategy.lean_plan.batch_index
            else OrderedDict(batch=batch, batch_idx=batch_idx)
        )
        if module.automatic_optimization:
            return self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs), False
        return self.manual_optimization.run(kwargs), False

    def _end_batch(self, connector: Any) -> None:
        """End logging for a batch. Follows ``_LoggerConnector.on_batch_end`` and ``.update_train_step_metrics``."""
        results = self._results
        if results:  # something was logged
            metrics = results.metrics(on_step=True)
            connector._progress_bar_metrics.update(metrics["pbar"])
            connector._callback_metrics.update(metrics["callback"])
            connector._logged_metrics.update(metrics["log"])
        results.batch = results.batch_size = None
        self.batch_progress.increment_completed()
        if results and self._may_log():
            connector.update_train_step_metrics()

    def _may_log(self) -> bool:
        """Return whether values may be due for the loggers. Follows ``_LoggerConnector.should_update_logs``.

        The connector makes the final decision, after searching for the running loop.
        """
        trainer: Any = self.trainer
        step = self._batches_that_stepped + 1
        return trainer.should_stop or trainer.fast_dev_run or step % (trainer.log_every_n_steps or 1) == 0


class LeanOptimization(InPlaceOf, AutomaticOptimization):
    """Automatic optimization with direct calls."""

    def _make_backward_fn(self, optimizer: Any) -> Callable[[Tensor], None] | None:
        """Return the backward pass of a step. Follows ``_AutomaticOptimization._make_backward_fn``."""
        if self._skip_backward:
            return None
        strategy = self.trainer.strategy
        return lambda loss: call_hook(strategy, strategy.lightning_module, "backward", loss, optimizer)

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Any]) -> None:
        """Call the module's ``optimizer_step``. Follows ``_AutomaticOptimization._optimizer_step``."""
        trainer = self.trainer
        strategy = trainer.strategy
        module = trainer.lightning_module
        # Only a strategy that accumulates by itself is called inside a window.
        steps = not (strategy.handles_gradient_accumulation and trainer.fit_loop._should_accumulate())
        progress = self.optim_progress.optimizer.step
        if steps:
            progress.increment_ready()
        optimizer = strategy._lightning_optimizers[0]
        arguments = trainer.current_epoch, batch_idx, optimizer, train_step_and_backward_closure
        call_hook(module, module, "optimizer_step", *arguments)
        if steps:
            progress.increment_completed()

    def _on_before_zero_grad(self, optimizer: Any) -> None:
        """Call the hooks before clearing gradients. Follows ``_AutomaticOptimization._on_before_zero_grad``."""
        trainer = self.trainer
        module = trainer.lightning_module
        progress = self.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        call_callbacks(trainer, module, "on_before_zero_grad", optimizer)
        call_hook(module, module, "on_before_zero_grad", optimizer)
        progress.increment_started()

    def _optimizer_zero_grad(self, batch_idx: int, optimizer: Any) -> None:
        """Clear the gradients, if there are any. Follows ``_AutomaticOptimization._optimizer_zero_grad``."""
        trainer = self.trainer
        module = trainer.lightning_module
        plan = self._plan
        # With release_gradients, the first forward pass of a window starts without gradients.
        if not plan.zero_grad or any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            call_hook(module, module, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        self.optim_progress.optimizer.zero_grad.increment_completed()

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        """Return the loss of a batch. Follows ``_AutomaticOptimization._training_step``."""
        trainer = self.trainer
        strategy = trainer.strategy
        module = trainer.lightning_module
        output = call_hook(strategy, module, "training_step", *kwargs.values())
        strategy.post_training_step()
        # Lightning divides by accumulate_grad_batches even if it is 1: one more kernel, and a graph node.
        if type(output) is Tensor and trainer.accumulate_grad_batches == 1:
            return ClosureResult(output)
        if output is None and trainer.world_size > 1:
            raise RuntimeError(
                "training_step returned None on one of several ranks; expected a loss, because the others would "
                "wait for its gradients. Return a loss of zero that depends on the parameters."
            )
        return self.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)

    @property
    def _plan(self) -> LeanPlan:
        strategy: Any = self.trainer.strategy
        return strategy.lean_plan


class LeanStrategy(Strategy):
    """Base of the turbo strategies: with a ``lean_plan``, hooks are called without Lightning's wrappers.

    It comes after Lightning's strategy in the bases, which defines none of these methods or calls super().

    Attributes:
        lean_plan: What the lean step leaves out; ``None`` without the lean loop.
    """

    lean_plan: LeanPlan | None = None

    def on_train_start(self) -> None:
        """Decide what the lean step leaves out. Lightning calls this after the hooks of callbacks and module."""
        super().on_train_start()
        trainer: Any = self.lightning_module.trainer  # pyright: ignore[reportOptionalMemberAccess]
        if isinstance(trainer.fit_loop.epoch_loop, LeanEpochLoop):
            self.lean_plan = plan_lean(trainer)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass with its hooks.

        Follows ``Strategy.backward``, ``Precision.pre_backward`` and ``Precision.post_backward``.
        """
        plugin = self.precision_plugin
        module = self.lightning_module
        if self.lean_plan is None or module is None or not self.lean_plan.backward:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        trainer = module.trainer
        self.pre_backward(closure_loss)
        call_callbacks(trainer, module, "on_before_backward", closure_loss)
        call_hook(module, module, "on_before_backward", closure_loss)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = closure_loss.detach()
        call_callbacks(trainer, module, "on_after_backward")
        call_hook(module, module, "on_after_backward")
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, which runs the closure.

        Follows ``Strategy.optimizer_step`` and ``Precision.optimizer_step``.
        """
        if self.lean_plan is None or not self.lean_plan.step:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        wrapped = partial(self._step_and_clip, model or self.lightning_module, optimizer, closure)
        return optimizer.step(closure=wrapped, **kwargs)

    def _step_and_clip(self, module: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
        """Run the closure and clip. Follows ``Precision._wrap_closure`` and ``Precision._after_closure``."""
        result = closure()
        trainer = module.trainer
        plan = self.lean_plan
        call_callbacks(trainer, module, "on_before_optimizer_step", optimizer)
        call_hook(module, module, "on_before_optimizer_step", optimizer)
        clip = {
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        }
        nothing_to_clip = plan is not None and plan.clip and set(clip.values()) == {None}
        if module.automatic_optimization and not nothing_to_clip:
            call_hook(module, module, "configure_gradient_clipping", optimizer, **clip)
        return result


# Logged values


class LeanMetric(ResultMetric):
    """A logged value that is not moved if it is already on the device.

    Attributes:
        settings: The arguments of the last ``self.log`` that Lightning checked.
        device_of_all: The device of all its tensors, once they have been moved.
    """

    settings: dict[str, Any] | None = None
    device_of_all: torch.device | None = None

    def to(self, *args: Any, **kwargs: Any) -> LeanMetric:
        """Move to a device. Follows ``_ResultMetric.to``."""
        if not self.is_tensor or args != (self.device_of_all,):
            super().to(*args, **kwargs)
            self.device_of_all = args[0] if args else None
        return self


class LeanResults(InPlaceOf, ResultCollection):
    """The logged values of an epoch; those for the progress bar stay tensors."""

    def __init__(self, stock: Any) -> None:
        super().__init__(stock)
        self.update(stock)

    def __setitem__(self, key: str, metric: Any) -> None:
        # Lightning stores each new metric here, right after creating it.
        super().__setitem__(key, LeanMetric(metric.meta, metric.is_tensor))

    def log(self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **settings: Any) -> None:
        """Log a value; settings that equal those of the last call are not checked again.

        Follows ``_ResultCollection.log``.
        """
        if torch.compiler.is_compiling():
            # Calls this method again, outside the graph: torch.compile breaks the graph here, as in Lightning.
            self._log_uncompiled(fx, name, value, batch_size=batch_size, **settings)
            return
        key = f"{fx}.{name}"
        metric: Any = self.get(key)  # a training batch has no dataloader_idx
        if metric is not None and metric.settings == settings and type(value) is Tensor and not value.requires_grad:
            metric.to(value.device)
            metric.forward(value, self._extract_batch_size(metric, batch_size, metric.meta))
            metric.has_reset = False
            return
        stock: Any = super()
        stock.log(fx, name, value, batch_size=batch_size, **settings)
        self[key].settings = settings

    _log_uncompiled: Any = torch.compiler.disable(log)

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar. Follows ``_ResultCollection.metrics``."""
        metrics: Any = {"callback": {}, "log": {}, "pbar": {}}
        for _, metric in self.valid_items():
            value = self._get_cache(metric, on_step)
            if isinstance(value, Tensor):
                self._add(metrics, metric, value, on_step)
        return metrics

    def _add(self, metrics: Any, metric: Any, value: Tensor, on_step: bool) -> None:
        name, forked_name = self._forked_name(metric, on_step)
        if metric.meta.logger:
            metrics["log"][forked_name] = value
        metrics["callback"][name] = metrics["callback"][forked_name] = value
        if metric.meta.prog_bar:
            metrics["pbar"][forked_name] = value if metric.is_tensor else value.item()


class LeanLoggerConnector(InPlaceOf, LoggerConnector):
    """The logger connector; values for the progress bar become numbers when they are read."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar, as numbers. Follows ``_LoggerConnector.progress_bar_metrics``."""
        super().progress_bar_metrics  # noqa: B018  # updates them
        return self.convert()

    def convert(self) -> dict[str, float]:
        """Convert the remaining tensors to numbers."""
        shown = self._progress_bar_metrics
        shown.update({name: value.item() for name, value in shown.items() if isinstance(value, Tensor)})
        return shown
