"""Lightning's keepers of logged values, which leave a value where it is until somebody reads it."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_turbo._lightning import LoggerConnector, ResultCollection, ResultMetric

__all__ = ["LeanLoggerConnector", "LeanMetric", "LeanResults"]

_KEPT = (torch.float32, torch.float64)  # dtypes that Lightning does not convert


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
