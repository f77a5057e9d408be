"""Torch's warnings of waits: each reaches the Doctor once; mode, filters and other warnings are left as they were."""

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
    """The mode of a device that is not there: it warns when it is set, as torch's does."""
    modes = [0]

    def change(mode):
        modes.append({"warn": 1}.get(mode, mode))
        warnings.warn(PROTOTYPE, stacklevel=2)  # torch's own says so once a process

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", change)
    return modes


def wait():
    with contextlib.suppress(UserWarning):  # an error where nobody listens
        warnings.warn(f"{WAIT} (Triggered internally at a.cpp:1.)", stacklevel=1)


def named(name, waits, result=None):
    """A function of torch's, as it were."""

    def function(*args, **kwargs):
        if waits:
            wait()
        return result

    function.__name__ = name
    return function


HOST = torch.ones(3)


@pytest.mark.parametrize(("function", "args", "noted"), [
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
def test_on_a_device_torch_says_what_waits_and_names_say_how(function, args, noted, mode):
    watch = StepWatch(Sources([]), Guard(lambda: None), cuda=True)
    watch.resume()
    watch.call(function, args, {}, sys._getframe())
    watch.pause()
    wait()
    assert [(call.kind, call.name) for call in watch.calls()] == noted


def test_a_wait_without_a_call_of_torchs_has_its_line(mode):
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
def test_each_wait_is_noted_with_its_frame_whatever_the_filters_are(filters, mode):
    noted = []
    with warnings.catch_warnings():
        warnings.simplefilter(filters)
        before = state()
        for _ in range(2):
            with report_waits(lambda frame: noted.append(frame.f_code)):
                assert mode[-1] == 1
                for _ in range(3):
                    wait()
        assert state() == before
    assert noted == [wait.__code__] * 6
    assert mode[-1] == 0


def test_an_error_in_the_step_puts_all_back(mode):
    before = state()
    with pytest.raises(ZeroDivisionError), report_waits(id):
        raise ZeroDivisionError
    assert (state(), mode[-1]) == (before, 0)


def test_other_warnings_and_those_of_other_threads_are_not_taken(mode):
    noted = []

    def warn():
        with report_waits(noted.append):
            warnings.warn("mine", stacklevel=1)
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()

    with pytest.warns(UserWarning, match="mine"):
        warn()
    assert noted == []


@pytest.mark.parametrize("own", [1, 2])
def test_a_mode_of_the_users_stays_and_its_warnings_are_shown(own, mode):
    noted = []
    mode.append(own)

    def wait_in_mode():
        with report_waits(noted.append):
            noted.append(mode[-1])
            wait()

    with pytest.warns(UserWarning, match=WAIT):
        wait_in_mode()
    assert (noted[0], len(noted), mode[-1]) == (own, 2, own)
