"""Torch's synchronization warnings: each reaches the Doctor once; mode, filters and other warnings do not change."""

import contextlib
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

from lightning_turbo.doctor.guard import Guard
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.watch import PROTOTYPE, WAIT, StepWatch, report_waits


@pytest.fixture
def mode(monkeypatch):
    """The sync debug mode of a fake device, which warns when it is set, as torch's does."""
    modes = [0]

    def change(mode):
        modes.append({"warn": 1}.get(mode, mode))
        warnings.warn(PROTOTYPE, stacklevel=2)  # torch warns once per process

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", change)
    return modes


def wait():
    with contextlib.suppress(UserWarning):  # an error if the Doctor does not catch it
        warnings.warn(f"{WAIT} (Triggered internally at a.cpp:1.)", stacklevel=1)


def named(name, waits, result=None):
    """Return a function that passes as one of torch."""

    def function(*args, **kwargs):
        if waits:
            wait()
        return result

    function.__name__ = name
    return function


HOST = torch.ones(3)


@pytest.mark.parametrize(("function", "args", "recorded"), [
    (named("item", True), (HOST,), [("sync", ".item()")]),
    (named("nonzero", True), (HOST,), [("sync", "torch.nonzero")]),
    (named("cholesky", True), (HOST,), [("sync", "torch.cholesky")]),
    (named("__getitem__", True), (HOST, HOST > 0), [("sync", "tensor[mask]")]),
    (named("__getitem__", True), (HOST, [0, 1]), [("moved", "a list as an index")]),
    (named("new_tensor", True), (HOST, [0, 1]), [("moved", ".new_tensor(...)")]),
    (named("tensor", False), (np.ones(3),), [("copied", "torch.tensor(array)")]),
    (named("item", False), (HOST,), []),
    (named("cpu", False), (HOST,), []),
    (named("new_tensor", False), (HOST, [0, 1]), []),
])  # fmt: skip
def test_synchronizing_calls_are_recorded_with_kind_and_name(function, args, recorded, mode):
    watch = StepWatch(Sources([]), Guard(lambda: None), cuda=True)
    watch.resume()
    watch.call(function, args, {}, sys._getframe())
    watch.pause()
    wait()
    assert [(call.kind, call.name) for call in watch.calls()] == recorded


def test_a_synchronization_without_a_call_of_torch_has_its_line(mode):
    watch = StepWatch(Sources([]), Guard(lambda: None), cuda=True)
    watch.inside = False  # as with a compiled model
    watch.resume()
    wait()
    watch.pause()
    (call,) = watch.calls()
    assert (call.kind, call.name, call.site.file, call.site.function) == ("sync", "a call", __file__, "wait")


def state():
    return warnings.showwarning, list(warnings.filters)


@pytest.mark.parametrize("filters", ["error", "ignore", "default"])
def test_each_synchronization_is_recorded_with_its_frame_under_any_warning_filters(filters, mode):
    recorded = []
    with warnings.catch_warnings():
        warnings.simplefilter(filters)
        before = state()
        for _ in range(2):
            with report_waits(lambda frame: recorded.append(frame.f_code)):
                assert mode[-1] == 1
                for _ in range(3):
                    wait()
        assert state() == before
    assert recorded == [wait.__code__] * 6
    assert mode[-1] == 0


def test_an_error_in_the_step_restores_the_sync_mode(mode):
    before = state()
    with pytest.raises(ZeroDivisionError), report_waits(id):
        raise ZeroDivisionError
    assert (state(), mode[-1]) == (before, 0)


def test_other_warnings_and_those_of_other_threads_are_not_recorded(mode):
    recorded = []

    def warn():
        with report_waits(recorded.append):
            warnings.warn("mine", stacklevel=1)
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()

    with pytest.warns(UserWarning, match="mine"):
        warn()
    assert recorded == []


@pytest.mark.parametrize("own", [1, 2])
def test_the_users_sync_mode_is_kept_and_its_warnings_are_shown(own, mode):
    recorded = []
    mode.append(own)

    def wait_in_mode():
        with report_waits(recorded.append):
            recorded.append(mode[-1])
            wait()

    with pytest.warns(UserWarning, match=WAIT):
        wait_in_mode()
    assert (recorded[0], len(recorded), mode[-1]) == (own, 2, own)
