"""Signals that come to a rank in its run, and while that is torn down."""

import os
import signal
from types import SimpleNamespace

import pytest

from lightning_turbo.strategies.signals import SignalConnectorOfRanks


class Launcher:
    def __init__(self):
        self.killed = []

    def kill(self, number):
        self.killed.append(number)


@pytest.fixture
def connector():
    strategy = SimpleNamespace(signals=SimpleNamespace(sigterm=False, requeue=0), launcher=Launcher())
    stock = SimpleNamespace(received_sigterm=False, trainer=SimpleNamespace(strategy=strategy))
    return SignalConnectorOfRanks(stock)


def send(number, handler):
    before = signal.signal(number, handler)
    try:
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_a_signal_in_a_run_is_noted_and_sent_to_the_processes_that_it_launched(connector):
    strategy = connector.trainer.strategy
    for _ in range(2):
        send(signal.SIGTERM, connector._sigterm_notifier_fn)
    send(signal.SIGUSR1, connector._slurm_sigusr_handler_fn)
    assert (strategy.signals.sigterm, strategy.signals.requeue) == (True, signal.SIGUSR1)
    assert strategy.launcher.killed == [signal.SIGTERM]
    assert not connector.received_sigterm, "until all ranks know of it"


def test_a_signal_while_a_run_is_torn_down_breaks_nothing_off(connector):
    connector.trainer.strategy.signals = None
    send(signal.SIGTERM, connector._sigterm_notifier_fn)
    send(signal.SIGUSR1, connector._slurm_sigusr_handler_fn)
    assert connector.received_sigterm
    assert connector.trainer.strategy.launcher.killed == []
