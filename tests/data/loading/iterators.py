"""Sources for iterators."""

import threading


def counting(made, end=10**9):
    for n in range(end):
        made.append(n)
        yield n


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
