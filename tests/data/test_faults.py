"""Everything that goes wrong around a loader; a hang fails by its time limit."""

import contextlib
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from lightning_turbo.data import DevicePrefetcher, PrefetchIterator, PrefetchLoader
from tests.data.samples import Rows, holds_in_a_fork, seeded, take, values
from tests.leftovers import nothing_is_left

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")

ENDLESS = 10**6


def act_at(at, act, index):
    return act() if index == at else index


def failing(act, at=9, length=40):
    """A dataset that does something else where one of its rows is asked for."""
    return Rows(length, functools.partial(act_at, at, act))


def fail(error):
    raise error


def raising(error):
    return failing(functools.partial(fail, error))


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("workers", "several"), [(0, 1), (0, 3), (2, 1), (1, 3)])
def test_error_in_the_dataset(workers, several):
    iterator = iter(PrefetchLoader(raising(ValueError("row 9 is bad")), 2, num_workers=workers, threads=several))
    got = []
    with pytest.raises(ValueError, match="row 9 is bad") as caught:
        got.extend(batch for batch in iterator if got.append(batch.tolist()))
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]
    text = "".join(str(entry) for entry in caught.traceback) + str(caught.value)
    assert "fail" in text
    assert values(iterator) == [[n, n + 1] for n in range(10, 40, 2)]  # the rest follows


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_base_exceptions_in_the_dataset_are_no_short_epoch(error, several):
    with pytest.raises(error) as caught:
        list(PrefetchLoader(raising(error()), 2, threads=several))
    assert "fail" in [entry.name for entry in caught.traceback]


def cannot_collate(samples):
    if 9 in samples:
        raise LookupError("cannot collate")
    return samples


def no_order():
    yield from range(9)
    raise LookupError("no order")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("broken", [lambda: {"collate_fn": cannot_collate}, lambda: {"sampler": no_order()}])
def test_error_in_collate_and_sampler(broken, workers):
    with pytest.raises(LookupError, match=r"cannot collate|no order"):
        list(PrefetchLoader(range(20), 2, num_workers=workers, **broken()))


def test_a_worker_that_is_killed_is_an_error():
    killed = failing(kill_this_process)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed by signal|exited unexpectedly)"):
        list(PrefetchLoader(killed, 2, num_workers=1))


def in_use():
    """Threads, processes and open files."""
    return threading.active_count(), len(multiprocessing.active_children()), len(os.listdir("/proc/self/fd"))


def resident():
    """Bytes of memory in use, without what the allocator keeps of threads that have ended."""
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("workers", "persistent", "several", "epochs"),
    [
        (0, False, 1, 20),
        (0, False, 3, 20),
        (1, False, 1, 8),
        (2, True, 1, 12),
        pytest.param(2, False, 1, 200, marks=pytest.mark.slow),
        pytest.param(2, True, 1, 200, marks=pytest.mark.slow),
    ],
)
def test_epochs_broken_off_early_leave_nothing(workers, persistent, several, epochs):
    dataset = Rows(40, lambda index: torch.zeros(64, 1024))  # 1 MiB a batch of 4: a leak of batches would show
    loader = PrefetchLoader(dataset, 4, num_workers=workers, persistent_workers=persistent, threads=several)

    def break_off(times):
        for _ in range(times):
            for number, _batch in enumerate(loader):
                if number == 3:
                    break
        gc.collect()
        if not persistent:
            nothing_is_left()

    break_off(5 if workers else 10)  # until the allocator has what it takes
    before, memory = in_use(), resident()
    break_off(epochs)
    # Threads, processes and files. A batch in flight holds a file, and workers that stay have some in flight, 4 at
    # most; a leak would be one an epoch.
    most = [then + more for then, more in zip(before, (0, 0, 4 if persistent else 0), strict=True)]
    deadline = time.monotonic() + 10  # what ends by itself may take a moment
    while any(now > limit for now, limit in zip(in_use(), most, strict=True)):
        assert time.monotonic() < deadline, (before, in_use())
        time.sleep(0.01)
    # 20 epochs would leak 20 times the batches in flight, which are 8 MiB; 30 MiB is noise.
    assert resident() - memory < 30 * 2**20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_running():
    iterator = iter(PrefetchLoader(range(ENDLESS), 2))
    take(iterator, 4)  # with a thread

    def fails_and_others_work():
        with pytest.raises(RuntimeError, match="forked child"):
            next(iterator)
        iterator.close()
        return values(PrefetchLoader(range(4), 2)) == [[0, 1], [2, 3]]

    assert holds_in_a_fork(fails_and_others_work)
    assert next(iterator).tolist() == [8, 9]


def test_worker_processes_started_while_another_loader_runs():
    running = iter(PrefetchLoader(range(ENDLESS), 2))
    take(running, 4)  # with a thread
    assert values(PrefetchLoader(range(6), 2, num_workers=2)) == [[0, 1], [2, 3], [4, 5]]
    assert next(running).tolist() == [8, 9]


def test_nested_loaders():
    def load(index):
        # With a generator of its own: every iter() of a loader draws a seed for its workers.
        return sum(batch.sum() for batch in PrefetchLoader(range(index + 1), 2, generator=seeded(index)))

    assert values(PrefetchLoader(Rows(6, load), 2)) == [[0, 1], [3, 6], [10, 15]]
    twice = PrefetchIterator(iter(PrefetchLoader(range(40), 2)), prefetch_batches=1)
    assert values(twice) == [[n, n + 1] for n in range(0, 40, 2)]
    moved = DevicePrefetcher(DevicePrefetcher(PrefetchLoader(range(6), 2), "cpu"), "cpu", transform=lambda b: b + 1)
    assert values(moved) == [[1, 2], [3, 4], [5, 6]]


# What is run on the iterator of a slow loader, with what settings; the interpreter is left by it, or behind it.
CTRL_C = """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born to ignore it
    pause = 0.2
    threading.Timer(0.5, _thread.interrupt_main).start()
    try:
        for batch in iterator:
            pass
    except KeyboardInterrupt:
        pass
    else:
        raise SystemExit("no interrupt")
    try:
        next(iterator)
    except RuntimeError as error:  # the thread had gone on without the batch
        assert "a KeyboardInterrupt stopped it" in str(error), error
    else:
        raise SystemExit("a batch is lost")
    assert threading.active_count() == 1, threading.enumerate()
"""
WAYS = {
    "at the end": ({}, ""), "exit": ({}, "sys.exit(0)"),
    "threads": ({"threads": 3}, ""),
    "workers": ({"num_workers": 2}, ""), "workers that stay": ({"num_workers": 2, "persistent_workers": True}, ""),
    "Ctrl-C": ({}, CTRL_C), "Ctrl-C with threads": ({"threads": 3}, CTRL_C),
    "error": ({}, """
    assert any(t.name.startswith("lightning_turbo-prefetch") for t in threading.enumerate())
    raise ValueError("the user's")
    """),
}  # fmt: skip
# Each way is gone in a fork of one interpreter. It ends as one that was started does, and has torch imported already.
# The objects of torch are left out of its last garbage collection.
LEAVE = """
import _thread, gc, json, os, signal, sys, tempfile, threading, time, torch
from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading import prefetcher

torch.multiprocessing.set_start_method("fork")  # a process of another kind has no class of a program behind -c

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        time.sleep(pause)
        return torch.randn(64, 64, generator=torch.Generator().manual_seed(index)) @ torch.ones(64, 64)

pause, prefetcher.MIN_SECONDS = 0.001, 0.0  # the loader gets a thread, fast as it is
gc.freeze()
children = []
for settings, code in json.loads(sys.argv[1]):
    said = tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(said.fileno(), 2)
        break
    children.append((child, said))
else:
    for child, said in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([status, said.read().decode().strip()]), flush=True)
    sys.exit()
loader = PrefetchLoader(Slow(), 4, **settings)
iterator = iter(loader)
for _ in range(4):
    next(iterator)
exec(code)
"""


@functools.cache
def left():
    """The exit status of each way, and what it said."""
    ways = json.dumps([(settings, textwrap.dedent(code)) for settings, code in WAYS.values()])
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, ways], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    return dict(zip(WAYS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", WAYS)
def test_leaving_the_interpreter_in_mid_epoch(way):
    status, said = left()[way]
    if way == "error":
        assert (status, said.splitlines()[-1]) == (1, "ValueError: the user's")
    else:
        assert (status, said) == (0, "")


def late(index):
    """The third sample and the fourth take longer than the timeout; a thread asks for them ahead."""
    time.sleep(1.2 if index >= 2 else 0)
    return index


def test_a_timeout_of_a_loader_with_workers_counts_from_when_a_batch_is_asked_for():
    seen = []
    # A worker process that is not forked takes longer to start, and torch counts that.
    settings = {"num_workers": 1, "prefetch_factor": 1, "timeout": 1, "multiprocessing_context": "fork"}
    for batch in PrefetchLoader(Rows(4, late), batch_size=1, **settings):
        seen.append(batch.item())
        time.sleep(1.4 if seen[-1] in (1, 2) else 0)
    assert seen == list(range(4))
