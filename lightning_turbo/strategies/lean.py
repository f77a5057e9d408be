"""The lean step: Lightning's loop over the batches of an epoch, followed line by line, with direct calls.

Nothing is patched. Subclasses of Lightning's own classes are set on one Trainer when it is set up to fit, and taken off
when it is torn down. Each shares its state with the object whose place it takes, so that counters, checkpoints and all
who look at them see no difference.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
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
    MixedPrecision,
    PassThroughProfiler,
    Precision,
    ResultCollection,
    ResultMetric,
    SignalConnector,
    SIGTERMException,
    Strategy,
    TrainingEpochLoop,
    is_overridden,
    move_data_to_device,
    takes_batch_index,
)

__all__ = [
    "LeanEpochLoop",
    "LeanLoggerConnector",
    "LeanMetric",
    "LeanOptimization",
    "LeanResults",
    "LeanSignalConnector",
    "LeanStrategy",
    "install_lean",
    "is_unprofiled",
    "replaced_loops",
]

_CONTEXTS = ("train_step_context", "forward_context")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BEFORE_BACKWARD, _AFTER_BACKWARD = ("pre_backward",), ("post_backward",)
_CLIP = "clip_gradients", "configure_gradient_clipping"
_AROUND_STEP = ("optimizer_step", "_wrap_closure", "_after_closure", "_clip_gradients")
_KEPT = (torch.float32, torch.float64)  # dtypes of logged values that Lightning does not convert


def replaced_loops(trainer: Any) -> list[str]:
    """Return the classes of a Trainer's training loops that are not Lightning's own."""
    loop = trainer.fit_loop.epoch_loop
    own = {TrainingEpochLoop: loop, AutomaticOptimization: loop.automatic_optimization}
    return [type(part).__name__ for stock, part in own.items() if type(part) is not stock]


def install_lean(trainer: Any, *, step: bool, logging: bool, sigterm_every: int) -> Callable[[], None]:
    """Set the lean parts on a Trainer that is about to fit.

    Args:
        trainer: With its strategy set up and loops of Lightning's own; no loop runs yet.
        step: Call the hooks of a training step directly.
        logging: Keep logged values where they are until somebody reads them.
        sigterm_every: Batches between two agreements of the ranks on signals; 1 leaves them to Lightning.

    Returns:
        What puts everything back; to be called once.
    """
    fit_loop, connector, signals = trainer.fit_loop, trainer._logger_connector, trainer._signal_connector
    loop = fit_loop.epoch_loop
    results = loop._results
    logging = logging and type(connector) is LoggerConnector and type(results) is ResultCollection
    trainer.strategy.direct = step
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
    """Call a hook of the module or the strategy, with the module told of its name, which ``self.log`` asks for.

    A hook that was set to ``None`` is not called.
    """
    state = vars(module)
    before, state["_current_fx_name"] = state["_current_fx_name"], hook
    function = getattr(owner, hook)
    output = function(*args, **kwargs) if callable(function) else None
    state["_current_fx_name"] = before
    return output


def _is_plain(plugin: Any, names: tuple[str, ...]) -> bool:
    """Whether a precision plugin does in these methods what Lightning's base class does."""
    unscaled = type(plugin) is MixedPrecision and plugin.scaler is None
    return inherits(plugin, MixedPrecision if unscaled else Precision, names)


# The loop


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


class _LeanClosure(Closure):
    """Step, clearing and backward, without a context for gradients where they are on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        result = Closure.closure.__wrapped__(self, *args, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]
        self._result = result
        return result.loss


class LeanOptimization(AutomaticOptimization):
    """Automatic optimization with direct calls.

    Args:
        stock: Lightning's, whose state is shared.
    """

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Closure:
        step, backward = self._make_step_fn(kwargs), self._make_backward_fn(optimizer)
        return _LeanClosure(step, backward, self._make_zero_grad_fn(batch_idx, optimizer))

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
        if not _clears_nothing(module, optimizer):
            call_hook(module, module, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        self.optim_progress.optimizer.zero_grad.increment_completed()

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        trainer, strategy, module = self.trainer, self.trainer.strategy, self.trainer.lightning_module
        owner = module if _hands_on(strategy, module) else strategy
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


def _clears_nothing(module: Any, optimizer: Any) -> bool:
    """Whether no gradient is there to be cleared, and nobody overrides what Lightning calls even then."""
    return (
        isinstance(optimizer, Optimizer)
        and inherits(module, LightningModule, ("optimizer_zero_grad",))
        and inherits(optimizer, Optimizer, ("zero_grad",))
        and all(p.grad is None for group in optimizer.param_groups for p in group["params"])
    )


def _hands_on(strategy: Any, module: Any) -> bool:
    """Whether the strategy's ``training_step`` does nothing but call the module's."""
    return (
        strategy.model is module
        and inherits(strategy, Strategy, ("training_step",))
        and inherits(strategy.precision_plugin, Precision, _CONTEXTS)
    )


class LeanEpochLoop(TrainingEpochLoop):
    """The loop over the batches of an epoch.

    Args:
        stock: Lightning's, whose state is shared.
        direct: Whether hooks are called directly.
        sigterm_every: Batches between two agreements of the ranks on SIGTERM; 1 is Lightning's way.
    """

    # No state of its own may stand among Lightning's, which goes into checkpoints.
    __slots__ = ("_direct", "_optimization", "_sigterm_every", "_step", "_stock", "_takes_index", "_validates")

    def __init__(self, stock: Any, direct: bool, sigterm_every: int) -> None:
        self.__dict__ = stock.__dict__
        self._stock = stock
        self._optimization = LeanOptimization(stock.automatic_optimization)
        self._direct = direct
        self._sigterm_every = sigterm_every
        self._step: Any = None
        self._takes_index = False
        self._validates = True

    def on_run_start(self, data_fetcher: Any) -> None:
        """Begin an epoch."""
        super().on_run_start(data_fetcher)
        source, module = self.val_loop._data_source, self.trainer.lightning_module
        self._validates = source.is_defined() and is_overridden("validation_step", module)
        profiled = not is_unprofiled(self.trainer)
        data_fetcher._start_profiler = self._stock._on_before_fetch if profiled else _nothing
        data_fetcher._stop_profiler = self._stock._on_after_fetch if profiled else _nothing

    def advance(self, data_fetcher: Any) -> None:
        """Run a batch; after a resume, under a profiler and with ``dataloader_iter`` Lightning's own method does."""
        trainer = self.trainer
        rare = self._restarting or isinstance(data_fetcher, DataLoaderIterDataFetcher) or not is_unprofiled(trainer)
        if rare or not self._direct:
            super().advance(data_fetcher)
            return
        if self.val_loop._restarting:
            self.val_loop.restarting = False
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            self._broadcast_sigterm_tensor()
        progress, strategy, module = self.batch_progress, trainer.strategy, trainer.lightning_module
        batch, _, __ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = self._moved(strategy.precision_plugin.convert_input(batch))
        progress.increment_ready()
        connector = trainer._logger_connector
        connector.on_batch_start(batch)
        output, ends_epoch = self._train_on(batch, batch_idx)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            self._step_schedulers()
        if ends_epoch:
            raise StopIteration
        call_callbacks(trainer, module, "on_train_batch_end", output, batch, batch_idx)
        call_hook(module, module, "on_train_batch_end", output, batch, batch_idx)
        self._end_batch(connector)

    def _step_schedulers(self) -> None:
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _end_batch(self, connector: Any) -> None:
        if not self._results:  # nothing was logged
            self._results.batch = self._results.batch_size = None
            self.batch_progress.increment_completed()
            return
        connector.on_batch_end()
        self.batch_progress.increment_completed()
        connector.update_train_step_metrics()

    def _train_on(self, batch: Any, batch_idx: int) -> tuple[Any, bool]:
        """Return the output of a step, and whether a hook has ended the epoch before it."""
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
        return self._optimized(batch, batch_idx), False

    def _optimized(self, batch: Any, batch_idx: int) -> Any:
        module = self.trainer.lightning_module
        if module.training_step != self._step:
            self._step, self._takes_index = module.training_step, takes_batch_index(module.training_step)
        kwargs = OrderedDict(batch=batch, batch_idx=batch_idx) if self._takes_index else OrderedDict(batch=batch)
        if module.automatic_optimization:
            return self._optimization.run(self.trainer.optimizers[0], batch_idx, kwargs)
        return self.manual_optimization.run(kwargs)

    def _moved(self, batch: Any) -> Any:
        """The batch on the device, through the hooks of the transfer where one of them is overridden."""
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        datamodule = getattr(self.trainer, "datamodule", None)
        plain = (
            inherits(module, DataHooks, _TRANSFER)
            and (datamodule is None or inherits(datamodule, DataHooks, _TRANSFER))
            and inherits(strategy, Strategy, ("batch_to_device",))
        )
        if not plain:
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            return call_hook(strategy, module, "batch_to_device", batch, dataloader_idx=0)
        device = strategy.root_device
        if type(batch) in (tuple, list) and all(type(x) is Tensor and x.device == device for x in batch):
            return type(batch)(batch)
        return move_data_to_device(batch, device)

    def _should_check_val_epoch(self) -> bool:
        return self._validates and super()._should_check_val_epoch()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step the schedulers of this interval, if there is any scheduler."""
        if self.trainer.lr_scheduler_configs:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    # SIGTERM on several ranks

    def _broadcast_sigterm_tensor(self) -> None:
        if self._sigterm_every == 1:
            super()._broadcast_sigterm_tensor()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate where it is due; with ``sigterm_every`` above 1, all ranks heed signals after the same batch."""
        if self._sigterm_every == 1 or self.trainer.world_size == 1:
            super().on_advance_end(data_fetcher)
            return
        # Lightning raises it for this rank alone, at the end of the method; here the others are asked first.
        with contextlib.suppress(SIGTERMException):
            super().on_advance_end(data_fetcher)
        batches = self.batch_progress.total.ready
        if batches % self._sigterm_every == 0 or self._num_ready_batches_reached():
            signals: Any = self.trainer._signal_connector
            # With the most and the fewest batches of a rank: one that ended before the others asks out of turn.
            own = [signals.received_sigterm, signals.received_requeue, batches, -batches]
            told = torch.tensor(own, device=self.trainer.strategy.root_device)
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
            received, requeue, *most = told.tolist()
            if most != [batches, -batches]:
                raise RuntimeError(
                    f"The ranks are not at the same batch: this one is at batch {batches} of its run, and another has "
                    "ended its epoch before or after it. Expected training loaders with the same number of batches on "
                    "every rank. Set limit_train_batches to what the shortest of them gives, or drop the rest."
                )
            if requeue:
                signals.save_and_requeue(requeue)
            signals.received_sigterm = bool(received)
            if signals.received_sigterm and not self._is_training_done:
                raise SIGTERMException


class LeanSignalConnector(SignalConnector):
    """Notes signals for the ranks to agree on; Lightning's talks to the other ranks from inside the signal's handler.

    Args:
        stock: Lightning's, whose state is shared.

    Attributes:
        received_requeue: The number of Slurm's signal that a job is to be saved and queued again; 0 without.
    """

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__
        self.received_requeue = 0

    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.received_sigterm and launcher is not None:
            launcher.kill(signum)
        self.received_sigterm = True

    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        self.received_requeue = int(signum)

    def save_and_requeue(self, signum: int) -> None:
        """Do what Lightning does on that signal; on all ranks at once."""
        self.received_requeue = 0
        super()._slurm_sigusr_handler_fn(signum, None)  # pyright: ignore[reportArgumentType] - it takes no frame


def _nothing() -> None:
    """Stand where Lightning calls a profiler around the fetching of a batch."""


# Logged values


class LeanMetric(ResultMetric):
    """A logged value; it is not moved to where it is.

    Attributes:
        settings: The arguments of ``self.log`` that it was last described with.
        device_of_all: Where its tensors are, once they were moved.
    """

    settings: dict[str, Any] | None = None
    device_of_all: torch.device | None = None

    def forward(self, value: Any, batch_size: int) -> None:
        """Take a value; one that is for its step alone has nothing to be added to."""
        meta = self.meta
        if meta.on_epoch or not self.is_tensor or value.requires_grad or value.dtype not in _KEPT:
            super().forward(value, batch_size)
            return
        self._computed = None
        self._update_count += 1
        self.value = self._forward_cache = meta.sync(value.clone())

    def to(self, *args: Any, **kwargs: Any) -> LeanMetric:
        """Move to a device."""
        device = args[0] if len(args) == 1 and not kwargs else None
        if device is None or not self.is_tensor or self.device_of_all != device:
            super().to(*args, **kwargs)
            self.device_of_all = device
        return self


class LeanResults(ResultCollection):
    """The logged values of an epoch; those for the progress bar stay tensors.

    Args:
        stock: Lightning's, whose values are taken over.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__(stock.training)
        self.__dict__ = stock.__dict__
        self.update(stock)

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, LeanMetric(metric.meta, metric.is_tensor))

    def log(self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **settings: Any) -> None:
        """Take a value; settings that are those of the last time are not looked at again."""
        if torch.compiler.is_compiling():  # a compiled step leaves its graph for this, as in Lightning
            self._log_uncompiled(fx, name, value, batch_size=batch_size, **settings)
            return
        key = f"{fx}.{name}"
        metric: Any = self.get(key) if self.dataloader_idx is None else None
        if metric is None or metric.settings != settings or type(value) is not Tensor or value.requires_grad:
            stock: Any = super()
            stock.log(fx, name, value, batch_size=batch_size, **settings)
            if self.dataloader_idx is None:
                self[key].settings = settings
            return
        metric.to(value.device)
        metric.forward(value, self._extract_batch_size(metric, batch_size, metric.meta))
        metric.has_reset = False

    _log_uncompiled: Any = torch.compiler.disable(log)

    def metrics(self, on_step: bool) -> Any:
        """Return the values by their readers: callbacks, loggers, progress bar."""
        metrics: Any = {"callback": {}, "log": {}, "pbar": {}}
        for _, metric in self.valid_items():
            value = self._get_cache(metric, on_step)
            if not isinstance(value, Tensor):
                continue
            name, forked_name = self._forked_name(metric, on_step)
            if metric.meta.logger:
                metrics["log"][forked_name] = value
            if self.training or (metric.meta.on_epoch and not on_step):
                metrics["callback"][name] = value
                metrics["callback"][forked_name] = value
            if metric.meta.prog_bar:
                metrics["pbar"][forked_name] = value if metric.is_tensor else value.item()
        return metrics


def _set_values(results: Any, values: list[Any]) -> None:
    """Set the values of a step; those that were logged for the first time since then have none."""
    for metric, value in zip_longest(results.values(), values):
        metric._forward_cache = value


class LeanLoggerConnector(LoggerConnector):
    """What stands between logged values and their readers; it passes them on when somebody reads.

    Args:
        stock: Lightning's, whose state is shared.
    """

    # No state of its own may stand among Lightning's.
    __slots__ = ("_current", "_ended_with", "_waiting")

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__
        self._current: Any = None  # the values of the loop that is in a batch
        self._waiting: Any = None  # those of a batch that nobody has read yet; the next batch's take their place
        self._ended_with: Any = None  # what they were, once another batch has begun, which may break off

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Begin a batch, of a validation too, whose values follow those of the training."""
        self._first_loop_iter = self._first_loop_iter is None
        results: Any = self.trainer._results
        self._current = results
        if self._waiting is results:
            self._ended_with = [metric._forward_cache for metric in results.values()]
        else:
            self.pass_on()
        results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx

    def on_batch_end(self) -> None:
        """Let go of the batch."""
        self._waiting, self._ended_with = self._current, None
        results = self._current
        results.batch = results.batch_size = None

    def pass_on(self) -> None:
        """Pass the values of the last batch that ended on to their readers."""
        results, self._waiting = self._waiting, None
        if results:
            if self._ended_with is None:
                metrics = results.metrics(True)
            else:
                under_way = [metric._forward_cache for metric in results.values()]
                _set_values(results, self._ended_with)
                metrics = results.metrics(True)
                _set_values(results, under_way)
            self._progress_bar_metrics.update(metrics["pbar"])
            self._callback_metrics.update(metrics["callback"])
            self._logged_metrics.update(metrics["log"])

    def epoch_end_reached(self) -> None:
        """End an epoch, of a validation too."""
        self.pass_on()
        super().epoch_end_reached()

    def reset_results(self) -> None:
        """Forget the values of an epoch."""
        self.pass_on()
        super().reset_results()

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The values for callbacks."""
        self.pass_on()
        return super().callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values for loggers."""
        self.pass_on()
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar, as numbers."""
        self.pass_on()
        super().progress_bar_metrics  # noqa: B018  # it brings them up to date
        return self.convert()

    def convert(self) -> dict[str, float]:
        """Turn the values that are tensors still into numbers."""
        shown = self._progress_bar_metrics
        for name, value in shown.items():
            if isinstance(value, Tensor):
                shown[name] = value.item()
        return shown
