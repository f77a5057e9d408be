"""The probe of the GIL: a load that holds it is told from one that waits or computes outside of it."""

import sys
import threading
import time

import pytest
import torch

from lightning_turbo.doctor.gil import GilProbe


@pytest.fixture(autouse=True)
def interval():
    """Lets Python switch threads so seldom that a busy machine is not mistaken for a GIL that is held."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.05)
    yield
    sys.setswitchinterval(before)


def compute():
    end, number = time.perf_counter() + 0.12, 0
    while time.perf_counter() < end:
        number += 1


def wait():
    time.sleep(0.06)


def compute_in_torch():
    end, matrix = time.perf_counter() + 0.06, torch.ones(500, 500)
    while time.perf_counter() < end:
        matrix @ matrix


def compute_in_another_thread():
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()


@pytest.mark.parametrize(("load", "held"), [
    (compute, True), (compute_in_another_thread, True), (wait, False), (compute_in_torch, False), (int, False),
])  # fmt: skip
def test_who_holds_the_gil(load, held):
    probe, threads = GilProbe(), threading.active_count()
    for _ in range(2):
        probe.begin()
        load()
        probe.end()
    probe.end()  # which does nothing
    assert (probe.share > 0.5) == held
    assert threading.active_count() == threads
