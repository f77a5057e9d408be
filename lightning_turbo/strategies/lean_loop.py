"""Lightning's loop over the batches of an epoch, followed line by line, with direct calls.

A loop shares its state with the one whose place it takes, so that counters, checkpoints and all who look at them see no
difference. It leaves out what changes nothing: the signature of ``training_step`` is read once and not at every step, a
loss is not divided by an accumulation of 1, no scheduler is asked for where there is none, and a batch that is on its
device is not walked through again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_turbo._lightning import (
    AutomaticOptimization,
    Closure,
    ClosureResult,
    DataHooks,
    DataLoaderIterDataFetcher,
    LightningModule,
    Precision,
    SignalConnector,
    SIGTERMException,
    Strategy,
    TrainingEpochLoop,
    is_overridden,
    move_data_to_device,
    takes_batch_index,
)
from lightning_turbo.strategies.calls import call_callbacks, call_hook, inherits, is_unprofiled

__all__ = ["LeanEpochLoop", "LeanOptimization", "LeanSignalConnector"]

_CONTEXTS = ("train_step_context", "forward_context")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


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
                "training_step returned None on one of several ranks; accepted is a loss, because the others would "
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
        output: Any = None
        ends_epoch = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            call_callbacks(trainer, module, "on_train_batch_start", batch, batch_idx)
            ends_epoch = call_hook(module, module, "on_train_batch_start", batch, batch_idx) == -1
            call_hook(strategy, module, "on_train_batch_start", batch, batch_idx)
            if ends_epoch:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                output = self._optimized(batch, batch_idx)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends_epoch:
            raise StopIteration
        call_callbacks(trainer, module, "on_train_batch_end", output, batch, batch_idx)
        call_hook(module, module, "on_train_batch_end", output, batch, batch_idx)
        if self._results:
            connector.on_batch_end()
        else:
            self._results.batch = self._results.batch_size = None
        progress.increment_completed()
        if self._results:
            connector.update_train_step_metrics()

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
                    "ended its epoch before or after it. Accepted are training loaders that give every rank the same "
                    "number of batches. Set limit_train_batches to what the shortest of them gives, or drop the rest."
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
