"""Signals that come to a rank in its run, and while that is torn down."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from lightning_turbo._distributed import SignalExchange
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


@pytest.fixture
def exchange(tmp_path):
    """Of a run of one rank: what it was told comes back a batch later."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    made = SignalExchange()
    yield made
    made.close()
    torch.distributed.destroy_process_group()


def test_a_job_is_requeued_once_though_ranks_are_told_a_batch_apart(exchange):
    told = [exchange.exchange()]
    for requeue in (10, 10, 0, 10, 0):
        exchange.requeue = requeue
        told.append(exchange.exchange())
    assert told == [(False, 0), (False, 0), (False, 10), (False, 0), (False, 0), (False, 0)]
    exchange.sigterm = True
    assert [exchange.exchange() for _ in range(3)] == [(False, 0), (True, 0), (True, 0)]
