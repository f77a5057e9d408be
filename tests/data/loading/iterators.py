"""Sources for iterators, and an iterator as a loader makes it."""

import threading

from lightning_turbo.data import PrefetchIterator
from lightning_turbo.data.loading.background import Background
from lightning_turbo.data.loading.position import Position
from lightning_turbo.data.loading.thread_policy import LoadProfile, ThreadPolicy


def counting(made, end=10**9):
    for n in range(end):
        made.append(n)
        yield n


def for_a_thread(source, prefetch_batches=8, timeout=0, **settings):
    """An iterator over a source that was found to be one for a thread, as a loader makes it for its second epoch."""
    profile = LoadProfile()
    profile.draws = ""
    profile.is_watched = True
    parts = Background(source, **settings), ThreadPolicy(profile), Position()
    return PrefetchIterator._of_loader(*parts, prefetch_batches=prefetch_batches, transfer=None, timeout=timeout)


class Stalling:
    """A source that waits before each item from number ``place`` on, until it is let go on."""

    def __init__(self, place):
        self.place, self.entered, self.release = place, threading.Event(), threading.Event()

    def items(self):
        for n in range(12):
            if n >= self.place:
                self.entered.set()
                self.release.wait(30)
            yield n
