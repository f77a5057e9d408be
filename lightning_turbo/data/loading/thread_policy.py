"""``ThreadPolicy``: whether a background thread may load batches, and whether it would gain anything."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from lightning_turbo._random import GeneratorWatch
from lightning_turbo.data.loading.locks import is_loading
from lightning_turbo.errors import NoEffectWarning

__all__ = ["LoadProfile", "ThreadPolicy"]

# Seconds. Batches that are loaded faster than this are loaded by the calling thread: to pass one from thread to thread
# costs 0.1 to 0.4 ms. Until FEW_BATCHES are loaded, their sum has to reach what FEW_BATCHES of this length would take:
# on a busy machine one takes milliseconds by chance, and a thread that was started stays for its epoch.
MIN_BATCH_SECONDS = 5e-4
FEW_BATCHES = 16

_logger = logging.getLogger("lightning_turbo.data")
_SEEDS = (
    "sample_seeds seeds the random generators of this process before each sample: a background thread would do so "
    "while a training step draws from them. Batches are loaded in the training thread instead, as by a plain "
    "DataLoader, with nothing gained. Use num_workers=1: a worker process has generators of its own."
)
_INDICES = "Give the sampler a generator of its own."
_SAMPLES = (
    "Use num_workers=1 (a process has generators of its own), or draw from a generator that is made for each sample."
)


class LoadProfile:
    """What is known about how a loader loads. A loader makes one, and its iterators fill it in for the next ones.

    Nothing is kept beside it: a dataset of the same class may draw where this one does not.

    Attributes:
        draws: What a batch was seen to draw random numbers from, as a clause; empty if it drew none, ``None`` before
            the second batch.
        is_watched: Whether a batch was watched line by line; before that, generators that are put back go unseen.
        has_warned: Whether it was warned that no thread loads here.
        batch_seconds: How long a batch took in the latest epoch, in whichever thread; ``None`` before it was measured.
    """

    def __init__(self) -> None:
        self.draws: str | None = None
        self.is_watched = False
        self.has_warned = False
        self.batch_seconds: float | None = None


class ThreadPolicy:
    """Whether a thread may and should load what comes after the batches that the calling thread has loaded.

    A ``PrefetchIterator`` makes one, calls it for each batch that it loads itself, and does not call it any more once a
    thread loads. First it is measured whether a thread would gain anything. Only then is a batch watched for random
    draws, which costs some ten milliseconds. After an epoch in which that was found out and batches were slow, a thread
    loads from the second batch on. Always: the first batch is the calling thread's, as orders are drawn there, and no
    thread loads what draws random numbers, or may do so.

    Args:
        profile: What is known of the loader.
        has_workers: Whether worker processes load, so that only indices are drawn in this process.
        is_seeded: Whether the generators are seeded before each sample, by ``sample_seeds``.

    Attributes:
        is_settled: Whether the next batch can be loaded without more ado: nothing is to be found out of it, and no
            state of a generator is to be recorded for it.
    """

    def __init__(self, profile: LoadProfile, *, has_workers: bool = False, is_seeded: bool = False) -> None:
        self.profile = profile
        self._has_workers = has_workers
        self._is_seeded = is_seeded and not has_workers
        self._loaded = 0  # batches, of which some were measured: not the first, and none that was watched
        self._measured = 0
        self._seconds = 0.0  # for those that were measured
        self._is_slow = profile.batch_seconds is not None and profile.batch_seconds >= MIN_BATCH_SECONDS
        self._is_watching = False
        self._verdict = ""  # as it was logged last
        self.is_settled = self._is_nothing_open()

    def _is_nothing_open(self) -> bool:
        profile = self.profile
        records_states = not self._has_workers and profile.draws != ""
        # A thread would gain something, and nobody knows whether one may load.
        is_unwatched = self._is_slow and not profile.is_watched and not self._is_seeded
        return not records_states and not is_unwatched

    def watch(self, held: Sequence[Any]) -> GeneratorWatch | None:
        """Return in what the next batch is to be loaded; ``None`` if nothing is to be found out of it.

        Args:
            held: The generators that the dataset holds.
        """
        is_unwatched = self._is_slow and not self.profile.is_watched and not self._is_seeded
        if not self._loaded or not (is_unwatched or self.profile.draws is None):
            return None
        self._is_watching = is_unwatched
        return GeneratorWatch(held, lines=self._count_lines() if is_unwatched else 0)

    def _count_lines(self) -> int:
        """Return how many lines are looked at, so that it takes as long as a batch does, or some 50 ms."""
        return max(GeneratorWatch.LINES, int(self._mean() / GeneratorWatch.LINE_SECONDS))

    def judge(self, watch: GeneratorWatch) -> None:
        """Keep what was found out of a batch that was watched and came without an error."""
        self.profile.draws = watch.found
        self.profile.is_watched = self.profile.is_watched or self._is_watching

    def count(self, seconds: float, is_left: bool) -> bool:
        """Count a batch that the calling thread has loaded.

        Args:
            seconds: How long it took.
            is_left: Whether the source and the limit leave anything to load after it.

        Returns:
            Whether a thread may and should load what comes after it.

        Warns:
            NoEffectWarning: If a thread would gain something and must not load, once for each loader.
        """
        self._loaded += 1
        if self._loaded > 1 and not self._is_watching:
            self._measured += 1
            self._seconds += seconds
        self._is_watching = False
        is_slow = self._seconds >= MIN_BATCH_SECONDS * max(self._measured, FEW_BATCHES)
        self._is_slow = is_slow or (self._is_slow and not self._measured)  # then the epoch before counts
        if self._is_slow or not self.is_settled:  # one that is quick stays as it is
            self.is_settled = self._is_nothing_open()
        if self._is_slow:
            return is_left and self._may_load()
        if self._loaded == FEW_BATCHES or not is_left:
            self.keep_seconds(self._mean())
            self._log("no thread: a batch takes %.2g ms", self._mean() * 1e3)
        return False

    def keep_seconds(self, seconds: float) -> None:
        """Keep the seconds per batch, with which the next epoch starts. A thread also calls this when it ends."""
        self.profile.batch_seconds = seconds

    def _may_load(self) -> bool:
        draws = self.profile.draws
        if self._is_seeded:
            self._log("no thread: sample_seeds seeds the generators of this process")
            self._warn_once(_SEEDS)
        elif draws:
            what, advice = ("Drawing the indices of", _INDICES) if self._has_workers else ("Loading", _SAMPLES)
            self._log("no thread: loading %s", draws)
            self._warn_once(
                f"{what} a batch {draws}: in a background thread the numbers would depend on timing, whatever the "
                "seed. Batches are loaded in the training thread instead, as by a plain DataLoader, with nothing "
                f"gained. {advice}"
            )
        elif is_loading():
            self._log("no thread: a prefetching thread iterates this loader")
        elif self.profile.is_watched:
            self._log("a thread loads: a batch takes %.2g ms", self._mean() * 1e3)
            self.keep_seconds(self._mean())
            return True
        return False

    def is_quick(self) -> bool:
        """Whether the calling thread can load a batch more without a wait that counts, and with the same numbers."""
        return self._loaded > 1 and not self._is_slow and self.profile.draws == "" and not is_loading()

    def _mean(self) -> float:
        """Return how long a batch takes, in seconds; before one was measured, how long in the epoch before."""
        return self._seconds / self._measured if self._measured else self.profile.batch_seconds or 0.0

    def _warn_once(self, message: str) -> None:
        if not self.profile.has_warned:
            self.profile.has_warned = True
            warnings.warn(message, NoEffectWarning, stacklevel=2)

    def _log(self, verdict: str, *values: object) -> None:
        if verdict != self._verdict:
            self._verdict = verdict
            _logger.debug(verdict, *values)
