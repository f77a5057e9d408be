"""The background thread: what it hands over, and that it always ends."""

import contextlib
import contextvars
import gc
import itertools
import os
import random
import sys
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch
from prefetch_generator import BackgroundGenerator

from lightning_turbo import _random
from lightning_turbo.data import PrefetchIterator, PrefetchLoader
from lightning_turbo.data.loading import background, locks, thread_policy
from lightning_turbo.data.loading.background import Background
from lightning_turbo.data.loading.resume import Position
from lightning_turbo.data.loading.thread_policy import LoadProfile, ThreadPolicy
from lightning_turbo.data.loading.thread_state import ThreadState
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from tests.data.samples import Rows, holds_in_a_fork
from tests.leftovers import prefetch_threads, wait_until


def counting(made, end=10**9):
    for n in range(end):
        made.append(n)
        yield n


def for_a_thread(source, prefetch_batches=8, timeout=0, **settings):
    """An iterator over a source that was found to be one for a thread, as a loader makes it for its second epoch."""
    profile = LoadProfile()
    profile.draws = ""
    profile.is_watched = True
    parts = Background(source, **settings), ThreadPolicy(profile), Position()
    return PrefetchIterator._of_loader(*parts, prefetch_batches=prefetch_batches, transfer=None, timeout=timeout)


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


def test_what_loads_fast_is_loaded_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(thread_policy, "MIN_BATCH_SECONDS", 60.0)
    who = []
    iterator = PrefetchIterator(who.append(threading.current_thread()) or n for n in range(20))
    assert not iterator.ready()  # nobody knows yet
    assert [next(iterator), next(iterator)] == [0, 1]
    assert iterator.ready()
    assert list(iterator) == list(range(2, 20))
    assert not iterator.ready()
    assert set(who) == {threading.current_thread()}


@pytest.mark.parametrize("pauses", [(0.0, 0.0), (0.0, 0.003), (0.003, 0.0)])
@pytest.mark.parametrize("length", [0, 1, 3, 30])
@pytest.mark.parametrize("depth", [1, 3])
def test_hands_over_every_item_in_order_and_ends(length, depth, pauses):
    source = (time.sleep(pauses[0]) or n for n in range(length))
    iterator = PrefetchIterator(source, prefetch_batches=depth)
    assert [(item, time.sleep(pauses[1])) for item in iterator] == [(n, None) for n in range(length)]
    assert not prefetch_threads()
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_keeps_so_many_ready_and_not_more(depth):
    made = []
    iterator = PrefetchIterator(counting(made), prefetch_batches=depth)
    assert [next(iterator), next(iterator), next(iterator)] == [0, 1, 2]
    assert type(prefetch_threads()[0]) is BackgroundGenerator  # as it is published
    # Handed out: 3. Ready: depth. In the thread's hands, waiting for room: one.
    wait_until(lambda: len(made) == 3 + depth + 1)
    time.sleep(0.05)
    assert len(made) == 3 + depth + 1


def test_no_more_is_taken_ahead_than_the_limit():
    taken = []
    iterator = for_a_thread(counting(taken, 20), limit=6)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    wait_until(lambda: len(taken) == 6)
    assert [next(iterator) for _ in range(3)] == [3, 4, 5]
    assert not iterator.ready()
    assert taken == list(range(6))
    assert next(iterator) == 6  # one that is asked for all the same
    assert taken == list(range(7))
    assert list(iterator) == list(range(7, 20))


@pytest.mark.parametrize("how", ["dropped", "closed", "in a cycle"])
def test_an_endless_source_ends_with_its_consumer(how):
    iterator = PrefetchIterator(counting([]), prefetch_batches=2)
    next(iterator), next(iterator)
    thread = prefetch_threads()[0]
    if how == "closed":
        iterator.close()
        iterator.close()
        assert not prefetch_threads()
        with pytest.raises(RuntimeError, match="cannot continue: it was closed"):
            next(iterator)
    if how == "in a cycle":
        iterator.itself = iterator
    del iterator
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_an_iterator_that_its_own_thread_collects_ends():
    started = threading.Event()

    def source():
        for n in range(10**9):
            if n == 3:
                started.wait(10)
                holder.clear()  # the last reference goes here, in a thread that the end would wait for
            yield n

    holder = [for_a_thread(source(), prefetch_batches=2)]
    assert [next(holder[0]), next(holder[0])] == [0, 1]
    started.set()
    wait_until(lambda: not holder and not prefetch_threads())


def test_a_thread_that_is_stuck_is_reported_and_ends_later(monkeypatch):
    monkeypatch.setattr(background, "JOIN_TIMEOUT", 0.05)
    source, disposed = Stalling(2), []
    iterator = for_a_thread(source.items(), on_close=lambda: disposed.append(1))
    assert [next(iterator), next(iterator)] == [0, 1]
    thread = prefetch_threads()[0]
    assert source.entered.wait(30)
    with pytest.warns(TurboWarning, match="still waits for the next"):
        iterator.close()
    assert not disposed
    source.release.set()
    thread.join(5)
    assert not thread.is_alive()
    assert disposed == [1]


@pytest.mark.parametrize("seconds", [0.4, 3.0])
def test_a_timeout_counts_from_when_an_item_is_asked_for(seconds):
    """A load that is hidden behind a long step is no timeout, as with a plain loader."""
    source = Stalling(2)
    iterator = for_a_thread(source.items(), timeout=seconds)
    assert [next(iterator), next(iterator)] == [0, 1]
    if seconds < 1:
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.4 seconds"):
            next(iterator)
    source.release.set()
    assert next(iterator) == 2


def test_batches_that_are_ready_are_let_go_where_an_epoch_is_left():
    """A loader keeps what is behind its latest iterator until the next one."""
    kept = []

    def load(index):
        batch = torch.full((3,), index)
        kept.append(weakref.ref(batch))
        time.sleep(0.002)
        return batch

    loader = PrefetchLoader(Rows(40, load), batch_size=None)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    wait_until(lambda: len(kept) >= 10)
    del iterator
    wait_until(lambda: not prefetch_threads())
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_no_batch_is_kept_by_the_thread():
    kept = []

    def source():
        for n in range(6):
            batch = torch.full((3,), n)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    iterator = PrefetchIterator(source(), prefetch_batches=1)
    for n, batch in enumerate(iterator):
        assert int(batch[0]) == n
        if n == 3:
            wait_until(lambda: len(kept) == 6)
            wait_until(lambda: kept[2]() is None)  # while the thread waits, not only when it has ended
    del batch
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_errors_come_at_their_item_with_their_traceback(error, place):
    def broken():
        yield from range(place)
        raise error

    iterator = PrefetchIterator(broken(), prefetch_batches=2)
    got = []
    with pytest.raises(type(error)) as caught:
        got.extend(item for item in iterator if got.append(item))
    assert got == list(range(place))
    assert caught.value is error
    assert "broken" in [entry.name for entry in caught.traceback]
    assert not prefetch_threads()
    if isinstance(error, Exception):
        assert list(iterator) == []  # a generator is dead after an error
    else:
        with pytest.raises(RuntimeError, match="stopped it while a batch was loaded"):
            next(iterator)


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration()])
def test_errors_of_a_stage_come_at_their_item_and_the_rest_follows(error):
    def stage(item):
        if item in (4, 5, 9):
            raise error
        return item

    iterator = for_a_thread(iter(range(12)))
    iterator.background.stages = [stage]
    got = []
    while not iterator.position.ended:
        try:
            got.append(next(iterator))
        except type(error):
            got.append("error")
        except StopIteration:
            break
    ends = isinstance(error, StopIteration)  # ends an epoch of a plain loader as well
    assert got == [0, 1, 2, 3, "error", *([] if ends else ["error", 6, 7, 8, "error", 10, 11])]
    assert not prefetch_threads()


@pytest.mark.parametrize("place", ["source", "stage"])
def test_an_error_keeps_nothing_alive(place):
    class Source:
        n = -1

        def __next__(self):
            self.n += 1
            return self.fail("source", self.n)

        def stage(self, item):
            return self.fail("stage", item)

        def fail(self, here, n):
            if (here, n) == (place, 4):
                raise ValueError
            return n

    source = Source()
    seen = weakref.ref(source)
    iterator = for_a_thread(source)
    iterator.background.stages = [source.stage]
    del source
    gc.disable()
    try:
        assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
        with contextlib.suppress(ValueError):
            next(iterator)
        del iterator
        wait_until(lambda: seen() is None)  # by counting references alone
    finally:
        gc.enable()


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
        got = list(for_a_thread(modes() for _ in range(6)))
    assert got == [here] * 6
    assert here != modes()


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


def drawn(draw):
    for n in range(6):
        draw()
        yield n, threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(
    ("name", "draw"),
    [("torch", lambda: torch.rand(1)), ("random", random.random), ("numpy.random", lambda: np.random.rand())],
)
def test_a_source_that_draws_from_shared_generators_stays_in_the_asking_thread(name, draw):
    with pytest.warns(NoEffectWarning, match=f"global RNG of {name}, .*num_workers=1") as told:
        assert list(PrefetchIterator(drawn(draw))) == [(n, True) for n in range(6)]
    assert len(told) == 1
    seeds = iter([torch.rand, *[int] * 5])  # draws at the start of a source keep nothing there
    got = list(PrefetchIterator(drawn(lambda: next(seeds)(1))))
    assert [main for _, main in got] == [True, True, False, False, False, False]


def test_an_interrupt_while_the_thread_is_started_leaves_none_that_takes_items(monkeypatch):
    def start(self):
        threading.Thread.start(self)
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundGenerator, "start", start)
    iterator = PrefetchIterator(counting(made := []))
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="cannot continue: a KeyboardInterrupt stopped it"):
        next(iterator)
    assert made == [0, 1]


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody traces")
def test_an_interrupt_at_any_line_of_the_second_batch_leaves_no_lock_held(monkeypatch):
    """Where the lines of the batch are traced, an interrupt comes between two of them."""
    holds, left = _random._Snapshot.holds, 0

    def interrupted(self):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return holds(self)

    def is_free():
        with locks.TURNS:  # a warning, if that has to wait, is an error
            free.append(True)

    monkeypatch.setattr(_random._Snapshot, "holds", interrupted)
    monkeypatch.setattr(locks, "LOCK_TIMEOUT", 0.5)
    for places in itertools.count(1):
        iterator, free, left = PrefetchIterator(counting([], 4)), [], places
        try:
            assert list(iterator) == [0, 1, 2, 3]
            break
        except KeyboardInterrupt:
            asking = threading.Thread(target=is_free)
            asking.start()
            asking.join()
            assert free, places
            assert not locks.is_loading()
    assert places > 3


def test_batches_in_memory_of_their_own_are_not_copied():
    made = [torch.full((3,), n) for n in range(6)]
    assert all(got is batch for got, batch in zip(PrefetchIterator(iter(made)), made, strict=True))


def test_a_collector_that_the_program_switched_off_stays_off():
    gc.disable()
    try:
        list(PrefetchLoader(range(8), 2))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_forked_while_a_thread_reads_states_has_a_collector_and_no_lock_held():
    inside, release = threading.Event(), threading.Event()

    def read():
        with _random.uncollected():
            inside.set()
            release.wait(0.2)

    def is_free():
        free = gc.isenabled() and _random._reading.acquire(timeout=1.0)
        if free:
            _random._reading.release()
        return free

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    assert holds_in_a_fork(is_free)
    release.set()
    thread.join()
    assert is_free()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_fork_waits_for_a_load_that_reads_a_state(monkeypatch):
    """As of a sampler with a generator. The load waits for nothing that the fork holds."""
    monkeypatch.setattr(locks, "LOCK_TIMEOUT", 2.0)
    inside, done = threading.Event(), threading.Event()

    def load():
        with locks.TURNS:
            inside.set()
            time.sleep(0.2)
            _random.torch_state()
            done.set()

    thread = threading.Thread(target=load)
    thread.start()
    inside.wait()
    assert holds_in_a_fork(done.is_set)
    thread.join()
