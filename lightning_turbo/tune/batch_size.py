"""Finds the largest batch that fits into memory and the size that is fastest per sample."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, markdown_table, seconds_by_sweep, three_digits
from lightning_turbo.tune.evidence import Comparison, Configuration
from lightning_turbo.tune.search import Runner
from lightning_turbo.tune.worker import OUT_OF_MEMORY

__all__ = ["BatchSizes"]

RIVALS = 3  # number of sizes to compare with the script's
PASSES = 6  # fixed in advance, as in the final comparison of a search
EPOCH_SECONDS = 2.0  # rounds consist of whole epochs if an epoch is at most this long
SQUARE_ROOT = ("Adam", "Lamb")  # optimizers whose steps do not scale with the gradient


class BatchSizes:
    """Doubles the batch size until it does not fit, bisects, and compares the fastest sizes.

    Each process runs alone, because two would share the memory; sizes alternate from process to process.

    ``run_tune`` creates it and calls ``run``, which ends after all comparisons, when the time is over, or after Ctrl-C.
    The script's own size is always the first row.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.rows: dict[int, dict[str, Any]] = {}  # size -> its first process; the script's size comes first
        self.against: dict[int, Comparison] = {}  # times per sample, compared with the script's size
        self.ended = ""  # why no larger size was tried
        self.facts: dict[str, Any] = {}  # from ``probe.describe_batches``
        # An epoch takes about equally long with any size. Its start and last batch count for all sizes or for none.
        self.whole_epochs = False

    @property
    def base(self) -> int:
        """The script's size."""
        return next(iter(self.rows))

    @property
    def fitting(self) -> list[int]:
        """The sizes that fit, in ascending order."""
        return sorted(size for size, row in self.rows.items() if row["status"] == "ok")

    @property
    def best(self) -> int:
        """The size that is fastest per sample beyond noise, or the script's size."""
        gaining = [size for size, each in self.against.items() if each.gains and len(each.logs) == PASSES]
        return min(gaining, key=lambda size: self.against[size].ratio, default=self.base)

    @property
    def compared(self) -> bool:
        """Whether all comparisons with the script's size are complete."""
        done = all(each.error or len(each.logs) == PASSES for each in self.against.values())
        return bool(self.against) and done

    def run(self) -> None:
        """Measure until everything is done, the time is over, or Ctrl-C; the attributes hold the results so far.

        Raises:
            TurboError: If the script cannot be measured.
            KeyboardInterrupt: After Ctrl-C before there is any result.
        """
        try:
            self._measure_own()
            self._grow()
            self._compare()
        except InterruptedRunError:
            pressed = self.runner.left > 0
            if not self.rows:
                if pressed:
                    raise KeyboardInterrupt from None
                raise TurboError("the time was over before the script's own batch size was measured.") from None
            self.ended = self.ended or ("the search was ended" if pressed else "the time was over")

    def _measure_own(self) -> None:
        """Measure the script's own size, and read the facts about its epochs."""
        first = self._measure(0)
        if first["status"] != "ok" or not first["numbers"]["batches"]["size"]:
            reason = first["reason"] or "expected a training DataLoader with a batch_size"
            raise TurboError(f"the script cannot be measured: {reason.rstrip('.')}.")
        self.facts = first["numbers"]["batches"]
        size = self.facts["size"]
        self.rows[size] = first
        self.whole_epochs = 0 < self._batches(size) * self._seconds(size) * size <= EPOCH_SECONDS
        again = self._measure(size)  # like all others; rounds of the first process had three steps
        if again["status"] == "skipped" and again["reason"] != OUT_OF_MEMORY:
            raise TurboError(f"the batch size cannot be changed: {again['reason'].rstrip('.')}.")
        self.rows[size] = again if again["status"] == "ok" else first

    def _grow(self) -> None:
        """Find the largest size that fits, measuring each size on the way."""
        low = self.base
        high = 2 * self.base
        samples_of_an_epoch = self.facts["samples"] or math.inf
        # low fits. Until a size has failed, sizes double; once high has failed (it is in rows), bisect.
        while high not in self.rows or high - low > max(1, low // 8):
            size = (low + high) // 2 if high in self.rows else high
            if size > samples_of_an_epoch:
                self.ended = f"an epoch has {samples_of_an_epoch} samples"
                return
            self.rows[size] = self._measure(size)
            fits = self.rows[size]["status"] == "ok"
            low, high = (size, 2 * size if size == high else high) if fits else (low, size)
        row = self.rows[high]
        self.ended = f"{high} {'does not fit' if row['reason'] == OUT_OF_MEMORY else 'fails'}: {row['reason']}"

    def _compare(self) -> None:
        rivals = sorted((size for size in self.fitting if size != self.base), key=self._seconds)[:RIVALS]
        self.against = {size: Comparison() for size in rivals}
        for _ in range(PASSES if rivals else 0):
            rows = {size: self._measure(size) for size in (self.base, *rivals)}
            for size, comparison in self.against.items():
                before = len(comparison.logs)
                comparison.add(rows[size], rows[self.base], steps_only=True)  # adds nothing if one of them failed
                # Convert times per step to times per sample: a step has this many times the samples.
                factor = self._samples(size) / self._samples(self.base)
                comparison.logs[before:] = [log - math.log(factor) for log in comparison.logs[before:]]

    def _measure(self, size: int) -> dict[str, Any]:
        configuration = Configuration(batch_size=size)
        if self.rows:
            # Use whole windows of accumulated batches: the optimizer steps after each, and at the end of an epoch.
            facts = self.rows[self.base]["numbers"]["facts"]
            window = self._batches(size) if self.whole_epochs else facts.get("accumulate", 1)
            self.runner.set_pace(self._seconds(self.fitting[-1]) * size, window)
        return dict(self.runner.measure([configuration])[configuration])

    def _batches(self, size: int) -> int:
        """Return the batches per epoch, measured or derived from the script's size; 0 if unknown."""
        known = self.rows[size if size in self.fitting else self.base]["numbers"]["facts"].get("batches") or 0
        if size in self.fitting or not self.facts["samples"]:
            return known
        whole, rest = divmod(self.facts["samples"], size)
        # A limit set in the Trainer holds for every size.
        return min(known, whole + (rest > 0 and not self.facts["drop_last"]))

    def _seconds(self, size: int) -> float:
        """Return the seconds per sample in the first process of a size."""
        return statistics.median(seconds_by_sweep(self.rows[size]).values()) / self._samples(size)

    def _samples(self, size: int) -> float:
        """Return the samples per step; with whole epochs the mean, because the last batch may be smaller."""
        if not self.whole_epochs or not self.facts["samples"]:
            return size
        return min(size, self.facts["samples"] / self._batches(size))

    def as_text(self) -> str:
        """Return the result in words, and a row for each size."""
        said = f"The largest batch that fits is {self.fitting[-1]} ({self.ended})."
        if not self.compared:
            said += " They were not compared with one another." if len(self.fitting) > 1 else ""
        elif self.best == self.base:
            said += f" None is faster a sample than the script's {self.base} beyond noise."
        else:
            rule = (
                "square-root"
                if any(part in name for name in self.facts["optimizers"] for part in SQUARE_ROOT)
                else "linear"
            )
            factor = (self.best / self.base) ** (0.5 if rule == "square-root" else 1.0)
            names = " and ".join(self.facts["optimizers"])
            said += (
                f" The fastest a sample is {self.best}: {self.against[self.best]}, against {self.base}. "
                f"The learning rate was not changed: for {names} the {rule} rule multiplies it by {factor:.3g}."
            )
        columns = ["batch size", "us a sample", "times as fast a sample", "MB", "how it ended"]
        return said + "\n\n" + "\n".join(markdown_table(columns, [self._cells(size) for size in sorted(self.rows)]))

    def _cells(self, size: int) -> list[str]:
        row = self.rows[size]
        if row["status"] != "ok":
            return [str(size), "", "", "", row["reason"]]
        factor = str(self.against[size]) if size in self.against else ""
        peak = f"{row['peak_bytes'] / 1e6:.0f}" if row["peak_bytes"] else ""
        return [str(size), three_digits(1e6 * self._seconds(size)), factor, peak, "fits"]
