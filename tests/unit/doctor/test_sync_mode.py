"""Torch's warnings of waits: each reaches the Doctor once; mode, filters and other warnings are left as they were."""

import threading
import warnings

import pytest
import torch

from lightning_turbo.doctor.sync_mode import PROTOTYPE, WAIT, report_waits


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
    warnings.warn(f"{WAIT} (Triggered internally at a.cpp:1.)", stacklevel=1)


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
