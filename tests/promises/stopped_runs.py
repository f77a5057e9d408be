"""A run that a signal stops and another run goes on with, beside the run that never stopped."""

import os
import signal
from contextlib import contextmanager

import pytest
from lightning.pytorch import Callback

from lightning_turbo import Preemption

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


class Sends(Callback):
    """Sends this process a signal in the nth call of a hook, not counting the check before the training."""

    def __init__(self, hook, nth=1, name="SIGTERM"):
        self.calls = 0

        def send(trainer, *_):
            self.calls += not trainer.sanity_checking or "sanity" in hook
            if self.calls == nth:
                self.calls += 1
                os.kill(os.getpid(), getattr(signal, name))

        setattr(self, hook, send)


@contextmanager
def handlers_put_back():
    """Restore the handlers of signals, which a preempted run leaves without effect until the process ends."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stops(run, *args, status=Preemption.EXIT_STATUS, **kwargs):
    """Run until the signal ends the run with an exit status."""
    with handlers_put_back(), pytest.raises(SystemExit) as end:
        run(*args, **kwargs)
    assert end.value.code == status
