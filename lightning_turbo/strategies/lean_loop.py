"""The lean loop: Lightning 2.6's loop over the batches of an epoch, with direct calls of its hooks.

No class is patched. For the duration of a fit, ``install_lean`` gives the objects of one Trainer that run a batch the
classes of this file; the objects and their attributes stay. The classes follow a batch from top to bottom: the epoch
loop, the optimization, the strategy, the logged values. Each method names the Lightning method that it follows, and
calls it where something needs it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._checks import inherits
from lightning_turbo._lightning import (
    AutomaticOptimization,
    Closure,
    ClosureResult,
    DataHooks,
    DataLoaderIterDataFetcher,
    LightningModule,
    LoggerConnector,
    Metric,
    MixedPrecision,
    PassThroughProfiler,
    Precision,
    ResultCollection,
    ResultMetric,
    Strategy,
    TrainingEpochLoop,
    block_parallel_sync_behavior,
    convert_tensors_to_scalars,
    move_data_to_device,
)
from lightning_turbo._trainer import takes_batch_index

__all__ = ["LeanStrategy", "find_custom_loops", "install_lean", "is_profiled"]

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_CLIP = ("configure_gradient_clipping", "clip_gradients")
_AROUND_STEP = (
    "pre_backward", "post_backward", "optimizer_step", "_wrap_closure", "_after_closure", "_clip_gradients",
    "clip_gradients",
)  # fmt: skip


def find_custom_loops(trainer: Any) -> list[str]:
    """Return the class names of a Trainer's training loops that are not Lightning's own."""
    loop = trainer.fit_loop.epoch_loop
    own = {TrainingEpochLoop: loop, AutomaticOptimization: loop.automatic_optimization}
    return [type(part).__name__ for stock, part in own.items() if type(part) is not stock]


def is_profiled(trainer: Any) -> bool:
    """Return whether the Trainer's profiler does something, or something, such as the Doctor, listens to its calls."""
    return type(trainer.profiler) is not PassThroughProfiler or "start" in vars(trainer.profiler)


def install_lean(trainer: Any) -> Callable[[], None]:
    """Make the loop, the optimization and the logged values of a Trainer lean.

    Args:
        trainer: A Trainer whose strategy is set up and whose loops are Lightning's own and not running.

    Returns:
        A function that undoes it; call it once.
    """
    undo = contextlib.ExitStack()
    loop = trainer.fit_loop.epoch_loop
    undo.callback(trainer.strategy.forget_overrides)
    _change_class(undo, loop, LeanEpochLoop)
    _change_class(undo, loop.automatic_optimization, LeanOptimization)
    connector = trainer._logger_connector
    logged = loop._results, loop.val_loop._results
    # Another connector reads the numbers for the progress bar itself.
    if type(connector) is LoggerConnector and all(type(results) is ResultCollection for results in logged):
        undo.callback(_make_numbers, connector)
        _change_class(undo, connector, LeanConnector)
        for results in logged:
            _change_class(undo, results, LeanResults)
            undo.callback(_set_classes, results, ResultMetric)
            _set_classes(results, LeanMetric)
    return undo.close


def _change_class(undo: contextlib.ExitStack, part: Any, lean: type) -> None:
    undo.callback(setattr, part, "__class__", type(part))
    part.__class__ = lean


def _set_classes(results: dict[str, Any], kind: type) -> None:
    for metric in results.values():
        metric.__class__ = kind


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


# A batch


class LeanEpochLoop(TrainingEpochLoop):
    """The loop over the batches of an epoch, with direct calls."""

    def advance(self, data_fetcher: Any) -> None:
        """Run a batch. Follows ``_TrainingEpochLoop.advance``.

        Calls it with a profiler, in a resumed epoch, and for ``dataloader_iter``.
        """
        trainer = self.trainer
        if is_profiled(trainer) or self._restarting or isinstance(data_fetcher, DataLoaderIterDataFetcher):
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
        trainer._logger_connector.on_batch_start(batch)
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
        has_logged = bool(self._results)
        if has_logged:
            trainer._logger_connector.on_batch_end()
        self._results.batch = None
        self.batch_progress.increment_completed()
        if has_logged:
            trainer._logger_connector.update_train_step_metrics()

    def _to_device(self, batch: Any) -> Any:
        """Move a batch. Follows ``LightningModule._apply_batch_transfer_handler``."""
        strategy: Any = self.trainer.strategy
        if not strategy.transfer_is_plain:
            module = self.trainer.lightning_module
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            return call_hook(strategy, module, "batch_to_device", batch, dataloader_idx=0)
        device = strategy.root_device
        if type(batch) in (tuple, list) and all(type(part) is Tensor and part.device == device for part in batch):
            return type(batch)(batch)  # a new container, as returned by the move: a hook may change it
        return move_data_to_device(batch, device)

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
        kwargs: OrderedDict[str, Any] = OrderedDict(batch=batch)
        if strategy.takes_batch_index:
            kwargs["batch_idx"] = batch_idx
        if module.automatic_optimization:
            return self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs), False
        return self.manual_optimization.run(kwargs), False


class LeanOptimization(AutomaticOptimization):
    """Automatic optimization with direct calls."""

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Run the step of a batch: forward, backward and the optimizer. Follows ``_AutomaticOptimization.run``."""
        trainer = self.trainer
        if is_profiled(trainer) or self._skip_backward:
            return super().run(optimizer, batch_idx, kwargs)
        strategy = trainer.strategy
        begins_window = batch_idx % trainer.accumulate_grad_batches == 0
        closure = Closure(
            partial(self._forward, kwargs),
            lambda loss: call_hook(strategy, strategy.lightning_module, "backward", loss, optimizer),
            partial(self._clear_gradients, batch_idx, optimizer) if begins_window else None,
        )
        accumulates = trainer.fit_loop._should_accumulate()
        # A strategy that accumulates by itself is called inside a window too.
        if accumulates and not strategy.handles_gradient_accumulation:
            with block_parallel_sync_behavior(strategy):
                closure()
        else:
            self._step(batch_idx, closure, accumulates)
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def _forward(self, kwargs: Any) -> ClosureResult:
        """Return the loss of a batch. Follows ``_AutomaticOptimization._training_step``."""
        trainer = self.trainer
        strategy = trainer.strategy
        output = call_hook(strategy, trainer.lightning_module, "training_step", *kwargs.values())
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

    def _clear_gradients(self, batch_idx: int, optimizer: Any) -> None:
        """Clear the gradients. Follows ``_on_before_zero_grad`` and ``_optimizer_zero_grad``."""
        trainer = self.trainer
        module = trainer.lightning_module
        progress = self.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        call_callbacks(trainer, module, "on_before_zero_grad", optimizer)
        call_hook(module, module, "on_before_zero_grad", optimizer)
        progress.increment_started()
        # After release_gradients there are no gradients, and zero_grad takes some percent of a small step.
        is_plain = inherits(module, LightningModule, ("optimizer_zero_grad",))
        is_plain = is_plain and inherits(optimizer, Optimizer, ("zero_grad",))
        if not is_plain or any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            call_hook(module, module, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        progress.increment_completed()

    def _step(self, batch_idx: int, closure: Closure, accumulates: bool) -> None:
        """Call the module's ``optimizer_step``. Follows ``_AutomaticOptimization._optimizer_step``."""
        trainer = self.trainer
        module = trainer.lightning_module
        progress = self.optim_progress.optimizer.step
        if not accumulates:
            progress.increment_ready()
        optimizer = trainer.strategy._lightning_optimizers[0]
        call_hook(module, module, "optimizer_step", trainer.current_epoch, batch_idx, optimizer, closure)
        if not accumulates:
            progress.increment_completed()


class LeanStrategy(Strategy):
    """Base of the turbo strategies: in a lean fit, hooks are called without Lightning's wrappers.

    It comes after Lightning's strategy in the bases, which defines none of these methods or calls super().

    Attributes:
        transfer_is_plain: Whether nothing overrides the hooks around the transfer of a batch to the device.
        step_is_plain: Whether the precision plugin does nothing around backward and the optimizer's step.
        takes_batch_index: Whether ``training_step`` has an argument for the batch index.
    """

    transfer_is_plain = False
    step_is_plain = False
    takes_batch_index = True

    def on_train_start(self) -> None:
        """Look for overrides. Lightning calls this after the hooks of callbacks and module."""
        super().on_train_start()
        trainer: Any = self.lightning_module.trainer  # pyright: ignore[reportOptionalMemberAccess]
        if not isinstance(trainer.fit_loop.epoch_loop, LeanEpochLoop):
            return
        self.takes_batch_index = takes_batch_index(trainer.lightning_module.training_step)
        movers = [each for each in (self.lightning_module, trainer.datamodule) if each is not None]
        self.transfer_is_plain = inherits(self, Strategy, ("batch_to_device",)) and all(
            inherits(mover, DataHooks, _TRANSFER) for mover in movers
        )
        # The methods of MixedPrecision only do more with a scaler.
        plugin = self.precision_plugin
        without_scaler = type(plugin) is MixedPrecision and plugin.scaler is None
        self.step_is_plain = inherits(plugin, MixedPrecision if without_scaler else Precision, _AROUND_STEP)

    def forget_overrides(self) -> None:
        """Use Lightning's methods again."""
        self.transfer_is_plain = self.step_is_plain = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass with its hooks.

        Follows ``Strategy.backward``, ``Precision.pre_backward`` and ``Precision.post_backward``.
        """
        module: Any = self.lightning_module
        trainer = module.trainer
        if not self.step_is_plain or is_profiled(trainer):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        call_callbacks(trainer, module, "on_before_backward", closure_loss)
        call_hook(module, module, "on_before_backward", closure_loss)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = closure_loss.detach()
        call_callbacks(trainer, module, "on_after_backward")
        call_hook(module, module, "on_after_backward")
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, which runs the closure.

        Follows ``Strategy.optimizer_step`` and ``Precision.optimizer_step``.
        """
        module: Any = model or self.lightning_module
        if not self.step_is_plain or is_profiled(module.trainer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        return optimizer.step(closure=partial(_run_closure, module, optimizer, closure), **kwargs)


def _run_closure(module: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
    """Run the closure and clip. Follows ``Precision._wrap_closure`` and ``Precision._after_closure``."""
    result = closure()
    trainer = module.trainer
    call_callbacks(trainer, module, "on_before_optimizer_step", optimizer)
    call_hook(module, module, "on_before_optimizer_step", optimizer)
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    clips = not (value is algorithm is None and inherits(module, LightningModule, _CLIP))
    if clips and module.automatic_optimization:
        clip = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
        call_hook(module, module, "configure_gradient_clipping", optimizer, **clip)
    return result


# Logged values


class LeanResults(ResultCollection):
    """The logged values of an epoch."""

    def log(self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **settings: Any) -> None:
        """Log a value. Settings that equal those of the last call are not checked again.

        Follows ``_ResultCollection.log``.
        """
        if torch.compiler.is_compiling():
            # Calls this method again, outside the graph: torch.compile breaks the graph here, as in Lightning.
            self._log_uncompiled(fx, name, value, batch_size=batch_size, **settings)
            return
        index = self.dataloader_idx
        has_suffix = index is not None and settings.get("add_dataloader_idx", True)
        key = f"{fx}.{name}.{index}" if has_suffix else f"{fx}.{name}"
        metric: Any = self.get(key)
        is_detached = (type(value) is Tensor and not value.requires_grad) or isinstance(value, Metric)
        if metric is not None and is_detached and metric.settings == (settings, index):
            metric.to(value.device)
            metric.forward(value, self._extract_batch_size(metric, batch_size, metric.meta))
            metric.has_reset = False
            return
        stock: Any = super()
        stock.log(fx, name, value, batch_size=batch_size, **settings)
        self[key].settings = settings, index

    _log_uncompiled: Any = torch.compiler.disable(log)

    def __setitem__(self, key: str, metric: Any) -> None:
        # Lightning stores each new metric here, right after creating it.
        super().__setitem__(key, metric)
        metric.__class__ = LeanMetric

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar. Follows ``_ResultCollection.metrics``.

        Those for the progress bar are tensors, which ``LeanConnector`` makes numbers of when they are read.
        """
        metrics: Any = {"callback": {}, "log": {}, "pbar": {}}
        for _, metric in self.valid_items():
            value = self._get_cache(metric, on_step)
            if isinstance(value, Tensor):
                name, forked_name = self._forked_name(metric, on_step)
                if metric.meta.logger:
                    metrics["log"][forked_name] = value
                if self.training or (metric.meta.on_epoch and not on_step):
                    metrics["callback"][name] = metrics["callback"][forked_name] = value
                if metric.meta.prog_bar:
                    metrics["pbar"][forked_name] = _for_progress_bar(metric, value)
        return metrics


def _for_progress_bar(metric: Any, value: Tensor) -> Any:
    """Return a value that does not change, and that ``_make_numbers`` accepts."""
    if value.numel() != 1:
        return convert_tensors_to_scalars(value)  # Lightning's error
    # A torchmetrics.Metric may return its state, which its next update changes in place.
    return value if metric.is_tensor else value.clone()


class LeanConnector(LoggerConnector):
    """The logger connector. Values for the progress bar become numbers when they are read.

    Lightning makes them numbers after each batch, for which the host waits for the device.
    """

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar, as numbers. Follows ``_LoggerConnector.progress_bar_metrics``."""
        super().progress_bar_metrics  # noqa: B018 (adds the values since the end of the last batch)
        return _make_numbers(self)

    def on_batch_end(self) -> None:
        """Add the values of a batch. Follows ``_LoggerConnector.on_batch_end``.

        Lightning's searches for the results three times.
        """
        results: Any = self.trainer._results
        metrics = results.metrics(on_step=True)
        self._progress_bar_metrics.update(metrics["pbar"])
        self._callback_metrics.update(metrics["callback"])
        self._logged_metrics.update(metrics["log"])
        results.batch = results.batch_size = None

    def update_train_step_metrics(self) -> None:
        """Log the values of a step, if they may be due. Follows ``_LoggerConnector.should_update_logs``.

        Lightning's method, which searches for the running loop, decides.
        """
        trainer: Any = self.trainer
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        if trainer.should_stop or trainer.fast_dev_run or step % (trainer.log_every_n_steps or 1) == 0:
            super().update_train_step_metrics()


def _make_numbers(connector: Any) -> dict[str, float]:
    shown = connector._progress_bar_metrics
    shown.update(convert_tensors_to_scalars(shown))
    return shown


class LeanMetric(ResultMetric):
    """A logged value. Lightning moves it with each ``self.log``; this class, only if that moves something.

    Attributes:
        settings: The arguments of the last ``self.log`` that Lightning checked, and the index of its loader.
    """

    settings: tuple[dict[str, Any], int | None] | None = None

    def to(self, *args: Any, **kwargs: Any) -> LeanMetric:
        """Move to a device. Follows ``_ResultMetric.to``."""
        (device,) = args
        if not _are_on(device, [vars(self).get("value"), *_tensors_of(self)]):
            super().to(device, **kwargs)
        return self


def _are_on(device: torch.device, parts: list[Any]) -> bool:
    """Return whether moving the parts of a logged value to a device certainly changes nothing."""
    for part in parts:
        if isinstance(part, Tensor):
            if part.device != device:
                return False
        elif part is not None and not (_are_on(device, part) if type(part) is list else _is_metric_on(device, part)):
            return False
    return True


def _is_metric_on(device: torch.device, metric: Any) -> bool:
    # A move also moves modules, parameters and buffers, and sets the dtype to torch's default.
    return (
        isinstance(metric, Metric)
        and _moves_like_any(type(metric))
        and not (metric._modules or metric._parameters or metric._buffers)
        and (metric.device, metric.dtype) == (device, torch.get_default_dtype())
        and _are_on(device, _tensors_of(metric))
    )


@functools.cache
def _moves_like_any(kind: type) -> bool:
    return kind.to is Metric.to and kind._apply is Metric._apply


def _tensors_of(metric: Any) -> list[Any]:
    """Return the states of a metric, their defaults, and the last values."""
    states = [getattr(metric, name) for name in metric._defaults]
    return [*states, *metric._defaults.values(), metric._forward_cache, metric._computed]
