"""Thread-local state: modes that the background thread copies, and the note on errors where it cannot."""

import asyncio
import contextvars
import signal
import sqlite3
import sys
import threading
import traceback
import types

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo.data import PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading.thread_state import ThreadState, add_thread_note
from tests.data.samples import Rows

variable = contextvars.ContextVar("variable", default="none")


def modes():
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"), torch.empty(0).device, variable.get(),
    )  # fmt: skip


CONTEXTS = [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.float16),
    lambda: torch.device("meta"),
]  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_callers_modes_reach_the_thread(context):
    variable.set("mine")
    with context():
        here = modes()
        got = list(PrefetchIterator(modes() for _ in range(6)))
    assert got == [here] * 6
    assert here != modes()


@pytest.mark.parametrize("context", CONTEXTS)
def test_modes_of_one_thread_end_with_it(context):
    with context():
        state, here = ThreadState(), modes()
    seen = []
    for enters in (True, False):
        thread = threading.Thread(target=lambda enters=enters: seen.append((enters and state.enter(), modes())[1]))
        thread.start()
        thread.join()
    assert seen[0][:-1] == here[:-1]
    assert seen[1][:-1] == modes()[:-1] != here[:-1]


def test_a_thread_works_on_the_cuda_device_and_stream_that_it_works_for(monkeypatch):
    """A device and a stream for each thread, as CUDA keeps them, are pretended here."""
    place = threading.local()
    default = types.SimpleNamespace(device=torch.device("cuda", 0))
    for name, value in {
        "is_initialized": lambda: True, "current_stream": lambda: getattr(place, "stream", default),
        "set_device": lambda device: setattr(place, "device", torch.device(device)),
        "set_stream": lambda stream: setattr(place, "stream", stream),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    own = types.SimpleNamespace(device=torch.device("cuda", 1))
    torch.cuda.set_stream(own)
    state, seen = ThreadState(), []
    thread = threading.Thread(target=lambda: seen.extend((state.enter(), place.device, place.stream)))
    thread.start()
    thread.join()
    assert seen == [None, own.device, own]


def of_sqlite():
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t(i integer)")
    connection.executemany("insert into t values (?)", [(n,) for n in range(24)])
    return lambda index: connection.execute("select i from t where i = ?", (index,)).fetchone()[0], connection.close


def of_event_loop():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def fetch(index):
        return index

    def close():
        loop.close()
        asyncio.set_event_loop(None)

    return lambda index: asyncio.get_event_loop().run_until_complete(fetch(index)), close


def of_signals():
    def load(index):
        signal.signal(signal.SIGALRM, signal.signal(signal.SIGALRM, signal.SIG_IGN))
        return index

    return load, lambda: None


def of_local_values():
    local = threading.local()
    local.values = list(range(24))
    return lambda index: local.values[index], lambda: None


BOUND = {"sqlite": of_sqlite, "asyncio": of_event_loop, "signal": of_signals, "threading.local": of_local_values}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("make", BOUND.values(), ids=BOUND)
def test_what_is_bound_to_a_thread_names_the_thread_and_what_to_do(make, threads, every_loader_has_a_thread):
    load, close = make()
    try:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - each kind has an error of its own
            list(PrefetchLoader(Rows(24, load), 4, threads=threads))
        text = "".join(traceback.format_exception(raised.value))
        assert text.count("loaded in a background thread, as prefetching does") == 1
        assert "num_workers=1" in text
        assert list(DataLoader(Rows(24, load), 4))
    finally:
        close()


def test_errors_of_the_calling_thread_and_of_worker_processes_carry_no_note(every_loader_has_a_thread):
    def fails(index):
        raise ValueError("sample")

    for settings in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        with pytest.raises(ValueError, match="sample") as raised:
            list(PrefetchLoader(Rows(24, fails), 4, **settings))
        assert "background thread" not in "".join(traceback.format_exception(raised.value))


def test_an_error_without_notes_carries_it_in_its_text(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10))
    for error, text in ((ValueError("a", 3), ("a\nThis was loaded", 3)), (OSError(2, "b"), (2, "b"))):
        add_thread_note(error)
        add_thread_note(error)
        first, *rest = error.args
        assert str(first).startswith(str(text[0]))
        assert str(first).count("background thread") == (text[0] != 2)
        assert rest == list(text[1:])
    for left in (KeyboardInterrupt("a"), StopIteration("a")):
        add_thread_note(left)
        assert left.args == ("a",)
