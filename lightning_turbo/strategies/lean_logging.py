"""Lightning's keepers of logged values, which leave a value where it is until somebody reads it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_turbo._compat import LoggerConnector, ResultCollection, ResultMetric

__all__ = ["LeanLoggerConnector", "LeanMetric", "LeanResults"]


class LeanMetric(ResultMetric):
    """A logged value; it is not moved to where it is."""

    def to(self, *args: Any, **kwargs: Any) -> LeanMetric:
        """Move to a device."""
        device = args[0] if len(args) == 1 and not kwargs else None
        if device is None or not self.is_tensor or vars(self).get("_device_of_all") != device:
            super().to(*args, **kwargs)
            self._device_of_all = device
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


class LeanLoggerConnector(LoggerConnector):
    """What stands between logged values and their readers; a number is made when the progress bar asks for it.

    Args:
        stock: Lightning's, whose state is shared.
    """

    def __init__(self, stock: Any) -> None:
        self.__dict__ = stock.__dict__

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar, as numbers."""
        super().progress_bar_metrics  # noqa: B018  # it brings them up to date
        return self.convert()

    def convert(self) -> dict[str, float]:
        """Turn the values that are tensors still into numbers."""
        shown = self._progress_bar_metrics
        for name, value in shown.items():
            if isinstance(value, Tensor):
                shown[name] = value.item()
        return shown
