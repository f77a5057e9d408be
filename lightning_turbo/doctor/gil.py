"""Whether loading holds the GIL, which decides between a thread and a process that loads ahead."""

from __future__ import annotations

import sys
import threading
import time

__all__ = ["GilProbe"]

PAUSE = 1e-3  # seconds that the thread sleeps


class GilProbe:
    """Measures for which share of a load another thread has to wait for the GIL.

    ``begin`` starts a thread that sleeps for a millisecond again and again, ``end`` ends and joins it; between loads
    there is none. Loading that waits or computes outside of the GIL lets it wake up in time. Loading that holds the GIL
    delays it until Python switches threads, 5 ms later by default. A sleep that is late by half of that counts as held:
    the scheduler of a busy machine is rarely that late.
    """

    def __init__(self) -> None:
        self._held = self._total = 0.0  # seconds; only the thread writes them, and only until it is joined
        self._over: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def share(self) -> float:
        """Share of the time of loading, 0 to 1; 0 if every load was shorter than a sleep."""
        return self._held / (self._total or 1.0)

    def begin(self) -> None:
        """Begin to measure a load."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sleep, args=(self._over,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The load is over; does nothing if none was begun."""
        if self._thread is not None and self._over is not None:
            self._over.set()
            self._thread.join()
        self._thread = self._over = None

    def _sleep(self, over: threading.Event) -> None:
        late = PAUSE + sys.getswitchinterval() / 2
        while not over.is_set():
            start = time.perf_counter()
            over.wait(PAUSE)
            took = time.perf_counter() - start
            if took >= PAUSE:  # else the load ended first
                self._total += took
                self._held += took if took > late else 0.0
