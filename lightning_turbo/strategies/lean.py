"""The lean step: Lightning's training epoch loop, line by line, with direct calls of its hooks.

Nothing is patched. ``install_lean`` sets subclasses of Lightning's classes on one Trainer for the length of a fit. Each
shares its ``__dict__`` with the object that it replaces, so that counters and checkpoints stay the same.
"""

from __future__ import annotations

import contextlib
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
    takes_batch_index,
)
from lightning_turbo.strategies.sigterm import AgreeingEpochLoop, AgreeingSignalConnector

__all__ = ["LeanStrategy", "find_custom_loops", "install_lean", "is_unprofiled"]

_CONTEXTS = ("train_step_context", "forward_context")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BEFORE_BACKWARD, _AFTER_BACKWARD = ("pre_backward",), ("post_backward",)
_CLIP = "clip_gradients", "configure_gradient_clipping"
_AROUND_STEP = ("optimizer_step", "_wrap_closure", "_after_closure", "_clip_gradients")
_KEPT = (torch.float32, torch.float64)  # dtypes of logged values that Lightning does not convert


def find_custom_loops(trainer: Any) -> list[str]:
    """Return the class names of a Trainer's training loops that are not Lightning's own."""
    loop = trainer.fit_loop.epoch_loop
    own = {TrainingEpochLoop: loop, AutomaticOptimization: loop.automatic_optimization}
    return [type(part).__name__ for stock, part in own.items() if type(part) is not stock]


def install_lean(trainer: Any, *, step: bool, logging: bool, sigterm_every: int) -> Callable[[], None]:
    """Replace the loop, the signal connector and the logger connector of a Trainer by lean ones.

    Args:
        trainer: Its strategy is set up, its loops are Lightning's own, and none of them runs yet.
        step: Call the hooks of a training step directly.
        logging: Keep logged values as tensors until the progress bar reads them.
        sigterm_every: Number of batches between two agreements of the ranks on signals; 1 leaves them to Lightning.

    Returns:
        A function that undoes all of it; call it once.
    """
    undo = contextlib.ExitStack()
    trainer.strategy.direct = step
    undo.callback(setattr, trainer.strategy, "direct", False)
    loop = trainer.fit_loop.epoch_loop
    if step or sigterm_every > 1:
        lean = LeanEpochLoop if step else AgreeingEpochLoop
        _replace(undo, trainer.fit_loop, "epoch_loop", lean(loop, sigterm_every))
    if sigterm_every > 1:
        _replace(undo, trainer, "_signal_connector", AgreeingSignalConnector(trainer._signal_connector))
    if logging:
        _install_lean_logging(undo, trainer, loop)
    return undo.close


def _install_lean_logging(undo: contextlib.ExitStack, trainer: Any, loop: Any) -> None:
    stock, connector = loop._results, trainer._logger_connector
    if type(connector) is LoggerConnector and type(stock) is ResultCollection:
        results, connector = LeanResults(stock), LeanLoggerConnector(connector)
        undo.callback(stock.update, results)
        _replace(undo, loop, "_results", results)
        _replace(undo, trainer, "_logger_connector", connector)
        undo.callback(connector.convert)


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


# Calls of hooks


def is_unprofiled(trainer: Any) -> bool:
    """Whether the Trainer's profiler is the one that does nothing."""
    return type(trainer.profiler) is PassThroughProfiler


def call_callbacks(trainer: Any, module: Any, hook: str, *args: Any) -> None:
    """Call a hook of every callback."""
    state = vars(module)
    before, state["_current_fx_name"] = state["_current_fx_name"], hook
    for callback in trainer.callbacks:
        function = getattr(callback, hook)
        if callable(function):
            function(trainer, module, *args)
    state["_current_fx_name"] = before


def call_hook(owner: Any, module: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the module or the strategy, unless it is ``None``; ``self.log`` needs its name."""
    state = vars(module)
    before, state["_current_fx_name"] = state["_current_fx_name"], hook
    function = getattr(owner, hook)
    output = function(*args, **kwargs) if callable(function) else None
    state["_current_fx_name"] = before
    return output


def _is_plain(plugin: Any, names: tuple[str, ...]) -> bool:
    """Whether these methods of a precision plugin do no more than those of Lightning's base class.

    Those of ``MixedPrecision`` do more only if there is a scaler.
    """
    unscaled = type(plugin) is MixedPrecision and plugin.scaler is None
    return inherits(plugin, MixedPrecision if unscaled else Precision, names)


# The loop


class LeanStrategy(Strategy):
    """Base of the turbo strategies: while ``direct`` is true, hooks are called without Lightning's wrappers.

    It stands after Lightning's strategy among the bases, which defines none of these methods or calls super().
    """

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
        if module.automatic_optimization and not self._has_nothing_to_clip(module):
            clip = {
                "gradient_clip_val": trainer.gradient_clip_val,
                "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            }
            call_hook(module, module, "configure_gradient_clipping", optimizer, **clip)
        return result

    def _has_nothing_to_clip(self, module: Any) -> bool:
        """Whether no clipping is configured, and no hook for it is overridden."""
        trainer = module.trainer
        return (
            trainer.gradient_clip_val is None
            and trainer.gradient_clip_algorithm is None
            and inherits(module, LightningModule, _CLIP)
            and _is_plain(self.precision_plugin, _CLIP[:1])
        )


class LeanOptimization(AutomaticOptimization):
    """Automatic optimization with direct calls."""

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__

    def _make_backward_fn(self, optimizer: Any) -> Callable[[Tensor], None] | None:
        if self._skip_backward:
            return None
        strategy = self.trainer.strategy
        return lambda loss: call_hook(strategy, strategy.lightning_module, "backward", loss, optimizer)

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Any]) -> None:
        trainer, strategy, module = self.trainer, self.trainer.strategy, self.trainer.lightning_module
        # Only a strategy that accumulates by itself is called in the middle of a window.
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
        trainer, module = self.trainer, self.trainer.lightning_module
        progress = self.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        call_callbacks(trainer, module, "on_before_zero_grad", optimizer)
        call_hook(module, module, "on_before_zero_grad", optimizer)
        progress.increment_started()

    def _optimizer_zero_grad(self, batch_idx: int, optimizer: Any) -> None:
        trainer, module = self.trainer, self.trainer.lightning_module
        if not _has_nothing_to_clear(module, optimizer):
            call_hook(module, module, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        self.optim_progress.optimizer.zero_grad.increment_completed()

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        trainer, strategy, module = self.trainer, self.trainer.strategy, self.trainer.lightning_module
        owner = module if _only_calls_module(strategy, module) else strategy
        output = call_hook(owner, module, "training_step", *kwargs.values())
        strategy.post_training_step()
        if type(output) is Tensor and trainer.accumulate_grad_batches == 1:
            return ClosureResult(output)
        if output is None and trainer.world_size > 1:
            raise RuntimeError(
                "training_step returned None on one of several ranks; expected a loss, because the others would "
                "wait for its gradients. Return a loss of zero that depends on the parameters."
            )
        return self.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)


def _has_nothing_to_clear(module: Any, optimizer: Any) -> bool:
    """Whether all gradients are ``None``, and no hook that clears them is overridden."""
    return (
        isinstance(optimizer, Optimizer)
        and inherits(module, LightningModule, ("optimizer_zero_grad",))
        and inherits(optimizer, Optimizer, ("zero_grad",))
        and all(p.grad is None for group in optimizer.param_groups for p in group["params"])
    )


def _only_calls_module(strategy: Any, module: Any) -> bool:
    """Whether the strategy's ``training_step`` only calls the module's."""
    return (
        strategy.model is module
        and inherits(strategy, Strategy, ("training_step",))
        and inherits(strategy.precision_plugin, Precision, _CONTEXTS)
    )


class LeanEpochLoop(AgreeingEpochLoop):
    """The loop over the batches of an epoch, with direct calls."""

    __slots__ = ("_optimization", "_step", "_takes_index")

    def __init__(self, stock: Any, sigterm_every: int) -> None:
        super().__init__(stock, sigterm_every)
        self._optimization = LeanOptimization(stock.automatic_optimization)
        self._step: Any = None
        self._takes_index = False

    def advance(self, data_fetcher: Any) -> None:
        """Run a batch: Lightning's method after a resume, under a profiler and with ``dataloader_iter``, else ours."""
        trainer = self.trainer
        if self._needs_lightnings(data_fetcher):
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

    def _needs_lightnings(self, data_fetcher: Any) -> bool:
        own_batches = isinstance(data_fetcher, DataLoaderIterDataFetcher)
        return self._restarting or own_batches or not is_unprofiled(self.trainer)

    def _begin_batch(self, connector: Any, batch: Any) -> None:
        # The connector's own methods look for the loop that runs whenever they need its results: seven times a batch.
        connector._first_loop_iter = connector._first_loop_iter is None
        self._results.batch, self._results.batch_size, self._results.dataloader_idx = batch, None, None

    def _end_batch(self, connector: Any) -> None:
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
        """Whether values may be due for the loggers; the connector decides, after a search for the loop that runs."""
        trainer: Any = self.trainer
        step = self._batches_that_stepped + 1
        return trainer.should_stop or trainer.fast_dev_run or step % (trainer.log_every_n_steps or 1) == 0

    def _train_on_batch(self, batch: Any, batch_idx: int) -> tuple[Any, bool]:
        """Return the output of the step, and whether a hook ended the epoch before it."""
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            return None, False
        trainer = self.trainer
        strategy, module = trainer.strategy, trainer.lightning_module
        call_callbacks(trainer, module, "on_train_batch_start", batch, batch_idx)
        ends_epoch = call_hook(module, module, "on_train_batch_start", batch, batch_idx) == -1
        call_hook(strategy, module, "on_train_batch_start", batch, batch_idx)
        if ends_epoch:
            self.batch_progress.increment_by(0, is_last_batch=True)
            return None, True
        self.batch_progress.increment_started()
        return self._optimize(batch, batch_idx), False

    def _optimize(self, batch: Any, batch_idx: int) -> Any:
        module = self.trainer.lightning_module
        if module.training_step != self._step:
            self._step, self._takes_index = module.training_step, takes_batch_index(module.training_step)
        kwargs = OrderedDict(batch=batch, batch_idx=batch_idx) if self._takes_index else OrderedDict(batch=batch)
        if module.automatic_optimization:
            return self._optimization.run(self.trainer.optimizers[0], batch_idx, kwargs)
        return self.manual_optimization.run(kwargs)

    def _to_device(self, batch: Any) -> Any:
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        if not self._transfers_as_usual():
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            return call_hook(strategy, module, "batch_to_device", batch, dataloader_idx=0)
        device = strategy.root_device
        if type(batch) in (tuple, list) and all(type(x) is Tensor and x.device == device for x in batch):
            return type(batch)(batch)  # a new container, as the move returns: a hook may change it
        return move_data_to_device(batch, device)

    def _transfers_as_usual(self) -> bool:
        """Whether no hook of the transfer is overridden in the module, the datamodule or the strategy."""
        datamodule = getattr(self.trainer, "datamodule", None)
        return (
            inherits(self.trainer.lightning_module, DataHooks, _TRANSFER)
            and (datamodule is None or inherits(datamodule, DataHooks, _TRANSFER))
            and inherits(self.trainer.strategy, Strategy, ("batch_to_device",))
        )

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step the schedulers of this interval."""
        if self.trainer.lr_scheduler_configs:
            super().update_lr_schedulers(interval, update_plateau_schedulers)


# Logged values


class LeanMetric(ResultMetric):
    """A logged value that is not moved to the device that it is on.

    Attributes:
        settings: The arguments of the last ``self.log`` that Lightning checked.
        device_of_all: The device of all its tensors, once they were moved.
    """

    settings: dict[str, Any] | None = None
    device_of_all: torch.device | None = None

    def forward(self, value: Any, batch_size: int) -> None:
        """Take a value; one that is logged on steps alone is not accumulated."""
        meta = self.meta
        if meta.on_epoch or not self.is_tensor or value.requires_grad or value.dtype not in _KEPT:
            super().forward(value, batch_size)
            return
        self._computed = None
        self._update_count += 1
        self.value = self._forward_cache = meta.sync(value.clone())

    def to(self, *args: Any, **kwargs: Any) -> LeanMetric:
        """Move to a device."""
        if not self.is_tensor or args != (self.device_of_all,):
            super().to(*args, **kwargs)
            self.device_of_all = args[0] if args else None
        return self


class LeanResults(ResultCollection):
    """The logged values of an epoch; those for the progress bar stay tensors."""

    def __init__(self, stock: Any) -> None:
        super().__init__(stock.training)
        self.__dict__ = stock.__dict__
        self.update(stock)

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, LeanMetric(metric.meta, metric.is_tensor))

    def log(self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **settings: Any) -> None:
        """Take a value; settings that equal those of the last call are not checked again."""
        if torch.compiler.is_compiling():
            # This method again, outside of the graph, which torch.compile breaks here, as in Lightning.
            self._log_uncompiled(fx, name, value, batch_size=batch_size, **settings)
            return
        key = f"{fx}.{name}"
        metric: Any = self.get(key) if self.dataloader_idx is None else None
        if metric is not None and metric.settings == settings and type(value) is Tensor and not value.requires_grad:
            metric.to(value.device)
            metric.forward(value, self._extract_batch_size(metric, batch_size, metric.meta))
            metric.has_reset = False
            return
        stock: Any = super()
        stock.log(fx, name, value, batch_size=batch_size, **settings)
        if self.dataloader_idx is None:
            self[key].settings = settings

    _log_uncompiled: Any = torch.compiler.disable(log)

    def metrics(self, on_step: bool) -> Any:
        """Return the values for callbacks, loggers and the progress bar."""
        metrics: Any = {"callback": {}, "log": {}, "pbar": {}}
        for _, metric in self.valid_items():
            value = self._get_cache(metric, on_step)
            if isinstance(value, Tensor):
                self._add(metrics, metric, value, on_step)
        return metrics

    def _add(self, metrics: Any, metric: Any, value: Tensor, on_step: bool) -> None:
        meta = metric.meta
        name, forked_name = self._forked_name(metric, on_step)
        if meta.logger:
            metrics["log"][forked_name] = value
        if self.training or (meta.on_epoch and not on_step):
            metrics["callback"][name] = metrics["callback"][forked_name] = value
        if meta.prog_bar:
            metrics["pbar"][forked_name] = value if metric.is_tensor else value.item()


class LeanLoggerConnector(LoggerConnector):
    """The logger connector; values for the progress bar become numbers when somebody reads them."""

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar, as numbers."""
        super().progress_bar_metrics  # noqa: B018  # it brings them up to date
        return self.convert()

    def convert(self) -> dict[str, float]:
        """Convert the values that are still tensors to numbers."""
        shown = self._progress_bar_metrics
        shown.update({name: value.item() for name, value in shown.items() if isinstance(value, Tensor)})
        return shown
