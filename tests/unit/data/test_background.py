"""The background thread: what it hands over, and that it always ends."""

import contextlib
import contextvars
import functools
import gc
import multiprocessing
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_turbo import _random
from lightning_turbo.data import background, producer, randomness, surroundings
from lightning_turbo.data.prefetcher import BackgroundIterator
from lightning_turbo.data.randomness import LoadWatch
from lightning_turbo.data.surroundings import SWITCH_INTERVAL
from lightning_turbo.errors import NoEffectWarning

pytestmark = pytest.mark.timeout(60)


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("lightning_turbo-prefetch")]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def counting(made, end=10**9):
    for n in range(end):
        made.append(n)
        yield n


def test_what_loads_fast_is_loaded_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(randomness, "WORTH", 60.0)
    who = []
    iterator = BackgroundIterator(who.append(threading.current_thread()) or n for n in range(20))
    assert not iterator.ready()  # nobody knows yet
    assert [next(iterator), next(iterator)] == [0, 1]
    assert iterator.ready()
    assert list(iterator) == list(range(2, 20))
    assert not iterator.ready()
    assert set(who) == {threading.current_thread()}


def test_a_loader_that_gets_slow_gets_a_thread(monkeypatch):
    watch = LoadWatch()
    watch.known = False
    monkeypatch.setattr(randomness, "WORTH", 0.25)
    for seconds in (0.5, 0.25, 0.125, 0.124):  # four of 0.25 s each would do
        watch.note(seconds)
    assert not watch.slow
    watch.note(0.26)
    assert watch.slow
    watch.note(0.0)
    assert watch.slow, "it stays so"
    iterator = BackgroundIterator(counting([]), watch=watch)
    assert next(iterator) == 0
    assert threads()
    assert [next(iterator) for _ in range(4)] == [1, 2, 3, 4]
    iterator.close()


@pytest.mark.parametrize("length", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("several", [1, 4])
def test_hands_over_every_item_in_order_and_ends(length, depth, several):
    def stage(n):
        time.sleep(0.002 if n % 5 == 0 else 0)  # the others overtake it
        return -n

    iterator = BackgroundIterator(iter(range(length)), prefetch_batches=depth, threads=several, stage=stage)
    assert list(iterator) == [-n for n in range(length)]
    assert not threads()
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_it_is_built_on_prefetch_generator():
    from prefetch_generator import BackgroundGenerator

    iterator = BackgroundIterator(counting([]))
    assert [next(iterator), next(iterator)] == [0, 1]
    assert isinstance(threads()[0], BackgroundGenerator)
    iterator.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("several", [1, 3])
def test_keeps_so_many_ready_and_not_more(depth, several):
    made = []
    iterator = BackgroundIterator(counting(made), prefetch_batches=depth, threads=several)
    assert [next(iterator), next(iterator), next(iterator)] == [0, 1, 2]
    # Handed out: 3. Ready: depth. In the threads' hands, waiting for room: as many as there are threads.
    wait_until(lambda: len(made) == 3 + depth + several)
    time.sleep(0.05)
    assert len(made) == 3 + depth + several
    iterator.close()


def test_several_threads_work_at_the_same_time_each_on_an_item_of_its_own():
    together = threading.Barrier(3, timeout=10)  # breaks unless three are inside at once
    who = set()

    def stage(item):
        if item >= 2:  # the first two are made in the asking thread
            together.wait()
            who.add(threading.current_thread())
        return item

    iterator = BackgroundIterator(iter(range(2 + 9)), threads=3, stage=stage, watch=slow())
    assert list(iterator) == list(range(11))
    assert len(who) == 3
    assert not threads()


def test_an_item_that_draws_from_its_owners_generator_is_made_by_one_thread_at_a_time():
    class Owner:
        def __init__(self):
            self.parts = [{"noise": random.Random(0)}]

        def __call__(self, item):
            inside.append(item)
            assert len(inside) == 1
            time.sleep(0.001)
            inside.remove(item)
            return self.parts[0]["noise"].random()

    inside = []
    watch = slow()
    owner = Owner()
    watch.owners = (owner,)
    iterator = BackgroundIterator(iter(range(30)), threads=3, stage=owner, watch=watch)
    with pytest.warns(NoEffectWarning, match="random generator that the dataset holds.*One thread"):
        got = list(iterator)
    expected = random.Random(0)
    assert got == [expected.random() for _ in range(30)]
    assert watch.alone


@pytest.mark.parametrize(
    "holder",
    [
        lambda g: {"a": [g]},
        lambda g: functools.partial(print, g),
        lambda g: functools.partial(print, key=g),
        lambda g: lambda: g,
        lambda g: types.SimpleNamespace(inner=types.SimpleNamespace(rng=g)),
        lambda g: Holding(g).forward,
        lambda g: torch.nn.Sequential(Holding(g)),
    ],
)
@pytest.mark.parametrize(
    "make", [random.Random, np.random.default_rng, np.random.RandomState, torch.Generator], ids=lambda m: m.__name__
)
def test_generators_are_found_where_datasets_hold_them(holder, make):
    generator = make()
    watch = LoadWatch()
    watch.owners = (holder(generator), np, range(10**9), {"self": watch})
    before = watch.private()
    assert len(before) == 1
    assert watch.private() == before
    torch.rand(1, generator=generator) if make is torch.Generator else generator.random()
    assert watch.private() != before


class Holding(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


def slow():
    watch = LoadWatch()
    watch.slow = True
    return watch


def test_works_ahead_while_the_consumer_is_busy():
    made = []
    iterator = BackgroundIterator(counting(made), prefetch_batches=2)
    next(iterator), next(iterator)
    wait_until(iterator.ready)
    iterator.close()


def test_an_endless_source_ends_with_its_consumer():
    iterator = BackgroundIterator(counting([]), prefetch_batches=2)
    next(iterator), next(iterator)
    thread = threads()[0]
    del iterator
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("several", [1, 3])
def test_an_iterator_that_its_own_thread_collects_ends(several):
    started = threading.Event()

    def stage(item):
        if item == 3:
            started.wait(10)
            holder.clear()  # the last reference goes here, in a thread that the end would wait for
        return item

    holder = [BackgroundIterator(counting([]), prefetch_batches=2, threads=several, stage=stage, watch=known(False))]
    assert next(holder[0]) == 0
    began = time.monotonic()
    started.set()
    wait_until(lambda: not holder and not threads())
    assert time.monotonic() - began < 5


def test_a_thread_that_collects_its_iterator_while_it_hands_over_an_item_ends():
    made = []
    iterator = BackgroundIterator(counting(made), prefetch_batches=2, watch=known(False))
    work = iterator.work
    assert next(iterator) == 0
    wait_until(work.producer.queue.full)
    put = work.producer.queue._put  # called with the lock of the queue held

    def collecting(item):
        work.end()
        put(item)

    work.producer.queue._put = collecting
    assert next(iterator) == 1
    wait_until(lambda: not threads())


def test_close_is_quick_repeatable_and_final():
    iterator = BackgroundIterator(counting([]), prefetch_batches=2)
    next(iterator), next(iterator)
    started = time.monotonic()
    iterator.close()
    iterator.close()
    assert time.monotonic() - started < 0.4  # less than one slice of waiting
    assert not threads()
    with pytest.raises(RuntimeError, match="cannot go on: it was closed"):
        next(iterator)


@pytest.mark.parametrize("several", [1, 3])
def test_parking_ends_the_thread_and_loses_nothing(several):
    iterator = BackgroundIterator(counting([], 30), prefetch_batches=3, threads=several)
    got = [next(iterator) for _ in range(4)]
    assert iterator.park()
    assert not threads()
    got += [next(iterator) for _ in range(7)]  # one more than may have been ready
    assert threads()
    assert iterator.park()
    assert got + list(iterator) == list(range(30))


def test_the_source_is_released_after_the_end():
    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

    source = Source()
    seen = weakref.ref(source)
    iterator = BackgroundIterator(source)
    del source
    assert list(iterator) == []
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("several", [1, 3])
def test_parking_in_the_middle_of_items_loses_nothing(monkeypatch, several):
    monkeypatch.setattr(background, "PATIENCE", 0.01)
    entered, release = threading.Event(), threading.Event()

    def stage(item):
        if item >= 4:
            entered.set()
            release.wait(30)
        return item

    iterator = BackgroundIterator(iter(range(12)), prefetch_batches=2, threads=several, stage=stage, watch=known(False))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    assert entered.wait(30)
    assert not iterator.park()
    release.set()
    assert list(iterator) == list(range(3, 12))


@pytest.mark.parametrize("several", [1, 3])
def test_no_batch_is_kept_by_the_thread(several):
    kept = []

    def source():
        for n in range(6):
            batch = torch.full((3,), n)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    iterator = BackgroundIterator(source(), prefetch_batches=1, threads=several)
    for n, batch in enumerate(iterator):
        assert int(batch[0]) == n
        if n == 3:
            wait_until(lambda: len(kept) == 6)
            wait_until(lambda: kept[2]() is None)  # while the threads wait, not only when they have ended
    del batch
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("place", [0, 1, 2, 5])
@pytest.mark.parametrize("several", [1, 3])
def test_errors_come_at_their_item_with_their_traceback(error, place, several):
    def broken():
        for n in range(8):
            if n == place:
                raise error
            yield n

    iterator = BackgroundIterator(broken(), prefetch_batches=2, threads=several)
    got = []
    with pytest.raises(type(error)) as caught:
        got.extend(item for item in iterator if got.append(item))
    assert got == list(range(place))
    assert caught.value is error
    assert "broken" in [entry.name for entry in caught.traceback]
    assert not threads()
    assert list(iterator) == []  # a generator is dead after an error


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), StopIteration()])
@pytest.mark.parametrize("several", [1, 3])
def test_errors_of_a_stage_come_at_their_item_and_the_rest_follows(error, several):
    def stage(item):
        time.sleep(0.002 * (item % 3))
        if item in (4, 5, 9):
            raise error
        return item

    iterator = BackgroundIterator(iter(range(12)), prefetch_batches=2, threads=several, stage=stage, watch=known(False))
    got = []
    while not iterator.ended:
        try:
            got.append(next(iterator))
        except type(error):
            got.append("error")
        except StopIteration:
            break
    if isinstance(error, StopIteration):  # ends an epoch of a plain loader as well
        assert got == [0, 1, 2, 3, "error"]
    else:
        assert got == [0, 1, 2, 3, "error", "error", 6, 7, 8, "error", 10, 11]
    assert not threads()


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("place", ["source", "stage"])
def test_an_error_keeps_nothing_alive(several, place):
    class Source:
        n = -1

        def __next__(self):
            self.n += 1
            if self.n == 4 and place == "source":
                raise ValueError
            return self.n

        def stage(self, item):
            if item == 4:
                raise ValueError
            return item

    source = Source()
    seen = weakref.ref(source)
    iterator = BackgroundIterator(source, threads=several, stage=source.stage, watch=known(False))
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


@pytest.mark.parametrize("several", [1, 3])
def test_a_source_that_survives_an_error_goes_on(several):
    class Source:
        n = -1

        def __next__(self):
            self.n += 1
            if self.n in (1, 4):
                raise ValueError(self.n)
            if self.n == 7:
                raise StopIteration
            return self.n

    iterator = BackgroundIterator(Source(), prefetch_batches=2, threads=several)
    got = []
    while not iterator.ended:
        try:
            got.append(next(iterator))
        except ValueError as error:
            got.append(error)
        except StopIteration:
            break
    assert [int(str(g)) if isinstance(g, ValueError) else g for g in got] == list(range(7))


def test_consumer_slower_and_faster():
    for ahead, behind in ((0.0, 0.01), (0.01, 0.0)):

        def source(pause=ahead):
            for n in range(12):
                time.sleep(pause)
                yield n

        got = []
        for item in BackgroundIterator(source(), prefetch_batches=2):
            time.sleep(behind)
            got.append(item)
        assert got == list(range(12))


def test_nested():
    inner = BackgroundIterator(iter(range(20)), prefetch_batches=2)
    outer = BackgroundIterator(inner, prefetch_batches=2)
    assert list(outer) == list(range(20))
    inner = BackgroundIterator(counting([]), prefetch_batches=2)
    outer = BackgroundIterator(inner, prefetch_batches=2)
    assert [next(outer) for _ in range(5)] == list(range(5))
    del inner
    outer.close()
    gc.collect()
    wait_until(lambda: not threads())


def test_stage_and_snapshot_run_in_the_background():
    where = []

    def stage(item):
        where.append(threading.current_thread().name)
        return item * 10

    made = []
    iterator = BackgroundIterator(counting(made, 5), stage=stage, snapshot=lambda: len(made))
    iterator.add_stage(lambda item: item + 1)
    assert iterator.place.state is None
    got = [(item, iterator.place.state) for item in iterator]
    assert got == [(1, 1), (11, 2), (21, 3), (31, 4), (41, 5)]
    assert where[-1].startswith("lightning_turbo-prefetch")


variable = contextvars.ContextVar("variable", default="none")


def modes():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.empty(0).device,
        variable.get(),
    )


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.device("meta"),
    ],
)
@pytest.mark.parametrize("several", [1, 3])
def test_the_callers_modes_reach_the_thread(context, several):
    def source():
        for _ in range(6):
            yield modes()

    def stage(item):
        return item, modes()

    variable.set("mine")
    with context():
        here = modes()
        got = list(BackgroundIterator(source(), stage=stage, threads=several, watch=known(False)))
    assert got == [(here, here)] * 6
    assert here != modes()


def known(value):
    watch = LoadWatch()
    watch.known, watch.slow = value, True
    return watch


@pytest.fixture
def switch_interval():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seconds", [0.005, 0.0001])
def test_the_switch_interval_is_shortened_and_put_back(switch_interval, seconds):
    sys.setswitchinterval(seconds)
    before = sys.getswitchinterval()
    iterators = [BackgroundIterator(counting([]), watch=known(False)) for _ in range(2)]
    for iterator in iterators:
        next(iterator)
    wait_until(lambda: surroundings._holders == 2)  # else the first could be gone before the second comes
    assert abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-9
    iterators[0].close()
    assert abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-9
    iterators[1].close()
    assert sys.getswitchinterval() == before


def test_a_switch_interval_that_the_program_sets_is_left_alone(switch_interval):
    before = sys.getswitchinterval()
    iterator = BackgroundIterator(counting([]), watch=known(False))
    next(iterator)
    wait_until(lambda: sys.getswitchinterval() != before)
    sys.setswitchinterval(0.002)
    iterator.close()
    assert sys.getswitchinterval() == pytest.approx(0.002)


@pytest.mark.parametrize("draw", ["torch", "random", "numpy.random"])
def test_a_source_that_draws_from_shared_generators_stays_in_the_asking_thread(draw):
    import random

    import numpy as np

    draws = {"torch": lambda: torch.rand(1), "random": random.random, "numpy.random": np.random.rand}

    def source():
        for n in range(6):
            draws[draw]()
            yield n, threading.current_thread()

    with pytest.warns(NoEffectWarning, match=f"generator of {draw}, .*num_workers=1"):
        got = list(BackgroundIterator(source()))
    assert got == [(n, threading.current_thread()) for n in range(6)]


def test_draws_at_the_start_of_a_source_keep_nothing_in_the_asking_thread():
    def source():
        order = torch.randperm(6).tolist()
        for n in order:
            yield n, threading.current_thread() is threading.main_thread()

    got = list(BackgroundIterator(source()))
    assert [main for _, main in got] == [True, True, False, False, False, False]


def test_draws_that_begin_late_are_found_out_and_reported():
    def source():
        for n in range(12):
            time.sleep(0.02)
            if n >= 3:
                random.random()
            yield n, threading.current_thread() is threading.main_thread()

    with pytest.warns(NoEffectWarning, match="generator of random, .*this run may not repeat"):
        got = list(BackgroundIterator(source(), prefetch_batches=1))
    assert [n for n, _ in got] == list(range(12))
    assert got[-1][1]
    assert not threads()


class Refills:
    """Draws what it gives for some items at once, from torch's own generator."""

    def __init__(self, every, end):
        self.every, self.end = every, end
        self.buffer, self.n, self.who = [], -1, []

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        if self.n == self.end:
            raise StopIteration
        time.sleep(0.001)
        self.who.append(threading.current_thread())
        if not self.buffer:
            self.buffer = torch.randperm(self.every).tolist()
        return self.buffer.pop()


def steps(iterator, draws=True, pause=0.0):
    """A model with dropout: what it gets, and what it draws."""
    torch.manual_seed(3)
    got = []
    for item in iterator:
        time.sleep(pause)
        got.append((item, float(torch.rand(1)) if draws else None))
    return got, float(torch.rand(1))


def refilled(draws=True, every=9):
    return steps(Refills(every, 40), draws)


@pytest.mark.parametrize("pause", [0.0, 0.003])
@pytest.mark.parametrize("depth", [1, 8])
def test_draws_now_and_then_come_where_they_would_without_a_thread(pause, depth):
    source = Refills(9, 40)
    iterator = BackgroundIterator(source, prefetch_batches=depth, watch=slow())
    with pytest.warns(NoEffectWarning, match="process-wide generator of torch.*num_workers=1") as told:
        got = steps(iterator, pause=pause)
    assert "may not repeat" not in str(told[0].message)
    assert got == refilled()
    assert source.who[9] is not threading.main_thread()  # which drew, in its turn
    assert source.who[-1] is threading.main_thread()
    assert not threads()


@pytest.mark.parametrize("drawing", [{9, 10}, {9, 10, 11, 12}, {9, 16}])
@pytest.mark.parametrize("pause", [0.0, 0.005])
@pytest.mark.parametrize("several", [1, 3])
def test_draws_of_items_that_are_under_way_come_at_their_turn(several, pause, drawing):
    def load(n):
        time.sleep(0.001)
        return n + float(torch.rand(1)) if n in drawing else n

    iterator = BackgroundIterator(iter(range(40)), threads=several, stage=load, watch=slow())
    with pytest.warns(NoEffectWarning) as told:
        got = steps(iterator, pause=pause)
    assert got == steps(map(load, range(40)))
    assert len(told) == 1
    assert "may not repeat" not in str(told[0].message)
    wait_until(lambda: not threads())


def test_draws_in_nested_threads_come_in_the_turn_of_the_outer_one():
    outer = BackgroundIterator(BackgroundIterator(Refills(9, 40), watch=slow()), watch=slow())
    with pytest.warns(NoEffectWarning):
        assert steps(outer, pause=0.003) == refilled()
    wait_until(lambda: not threads())


def test_parking_keeps_the_order_of_what_found_no_room(monkeypatch):
    full, drained = threading.Event(), threading.Event()
    put, drain = producer.Producer._put, producer.Producer._drain

    def put_slowly(self, record):
        there_was_room = put(self, record)
        if not there_was_room:
            full.set()
            drained.wait(5)
        return there_was_room

    def drain_late(self):
        full.wait(5)
        ready = drain(self)
        drained.set()
        return ready

    def source():
        for n in range(30):
            if n == 12:
                torch.rand(1)  # before which the thread hands over what it has begun
            yield n

    monkeypatch.setattr(producer, "SLICE", 0.01)
    monkeypatch.setattr(producer.Producer, "_put", put_slowly)
    monkeypatch.setattr(producer.Producer, "_drain", drain_late)
    iterator = BackgroundIterator(source(), prefetch_batches=6, threads=4, stage=float, watch=slow())
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    wait_until(lambda: iterator.work.producer.queue.full())
    with pytest.warns(NoEffectWarning, match="may not repeat"):
        assert iterator.park()
    assert list(iterator) == list(range(3, 30))


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("where", ["source", "stage"])
def test_draws_among_several_threads_come_in_the_turn_of_their_item(several, where):
    def draw(n, here):
        time.sleep(0.001)
        return n + float(torch.rand(1)) if n % 7 == 5 and where == here else n

    def source():
        for n in range(40):
            yield draw(n, "source")

    def plain():
        for n in source():
            yield draw(n, "stage")

    iterator = BackgroundIterator(source(), threads=several, stage=lambda n: draw(n, "stage"), watch=slow())
    with pytest.warns(NoEffectWarning):
        assert steps(iterator, pause=0.002) == steps(plain())
    assert not threads()


def test_own_generators_and_layers_that_are_not_training_wait_for_nothing():
    generator = torch.Generator()

    def source():
        for n in range(30):
            torch.rand(1, generator=generator)
            torch.nn.functional.dropout(torch.ones(3), training=False)
            yield n

    iterator = BackgroundIterator(source(), prefetch_batches=4, watch=known(False))
    assert next(iterator) == 0
    wait_until(lambda: iterator.work.producer.queue.full())  # nobody asks
    assert list(iterator) == list(range(1, 30))


def waiting_to_draw():
    """An iterator whose thread waits for the turn of item 3."""
    source = Refills(3, 40)
    iterator = BackgroundIterator(source, prefetch_batches=8, watch=slow())
    assert [next(iterator) for _ in range(2)]
    wait_until(lambda: len(source.who) == 4)
    time.sleep(0.02)
    assert not iterator.work.producer.drew
    return iterator


def test_a_draw_that_waits_is_given_up_when_the_iterator_is_closed_or_dropped():
    for end in (lambda holder: holder[0].close(), lambda holder: holder.clear()):
        torch.manual_seed(0)
        holder = [waiting_to_draw()]
        before = torch.get_rng_state()
        started = time.monotonic()
        end(holder)
        gc.collect()
        assert time.monotonic() - started < background.PATIENCE / 2
        assert not threads()
        assert torch.equal(torch.get_rng_state(), before)


def test_a_draw_that_waits_goes_ahead_when_the_thread_is_parked_and_that_is_told():
    iterator = waiting_to_draw()
    with pytest.warns(NoEffectWarning, match="may not repeat"):
        assert iterator.park()
    assert not threads()
    assert len(list(iterator)) == 38


def test_a_draw_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(producer, "PATIENCE", 0.1)
    lock = threading.Lock()

    def source():
        for n in range(12):
            with lock:
                if n == 4:
                    torch.rand(1)
            yield n

    iterator = BackgroundIterator(source(), watch=known(False))
    got = [next(iterator), next(iterator)]
    wait_until(lambda: lock.locked() or iterator.work.producer.rushed)
    with lock:  # as a dataset may be asked for something beside the loading
        pass
    with pytest.warns(NoEffectWarning, match="may not repeat"):
        got += list(iterator)
    assert got == list(range(12))


def test_workers_that_are_forked_in_the_thread_draw_at_once():
    context = multiprocessing.get_context("fork")

    def source():
        for n in range(8):
            if n == 4:  # in the thread, as a dataset with a loader of its own does
                worker = context.Process(target=torch.rand, args=(2,))
                worker.start()
                worker.join(20)
                yield worker.exitcode
            else:
                yield n

    iterator = BackgroundIterator(source(), prefetch_batches=6, watch=slow())
    assert next(iterator) == 0
    time.sleep(0.2)  # nobody asks for the fifth item while it is made
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        assert list(iterator) == [1, 2, 3, 0, 5, 6, 7]


def test_who_draws_is_not_looked_for_while_nothing_moves_and_told_when_it_was_missed():
    source = Refills(30, 70)
    watch = slow()
    iterator = BackgroundIterator(source, prefetch_batches=2, watch=watch)
    got = [next(iterator) for _ in range(25)]
    assert not watch.looking
    with pytest.warns(NoEffectWarning, match="may not repeat"):
        got += list(iterator)  # the draw at 30 is missed, that at 60 is not
    assert watch.unsure
    assert len(got) == 70


def test_every_function_of_torch_that_draws_is_known():
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        public = hasattr(torch, name) or hasattr(torch.Tensor, name)
        if public and schema.name.startswith("aten::") and any(each.name == "generator" for each in schema.arguments):
            names.add(name)
    assert names - randomness.DRAWS <= {"_fused_dropout", "random"}  # which Python does not call
    assert len(names) > 15


@pytest.mark.parametrize("value", [0, -1])
def test_a_number_of_threads_below_one_is_refused(value):
    with pytest.raises(ValueError, match=f"threads={value} is out of range"):
        BackgroundIterator(iter([]), threads=value)


@pytest.mark.parametrize("value", [0, -1])
def test_a_depth_below_one_is_refused(value):
    with pytest.raises(ValueError, match=rf"prefetch_batches={value} is out of range; pass the number"):
        BackgroundIterator(iter([]), prefetch_batches=value)


@pytest.mark.parametrize("value", [1.5, "2", True, None])
def test_a_depth_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match=r"prefetch_batches=.* is no integer"):
        BackgroundIterator(iter([]), prefetch_batches=value)


def test_no_iterator_is_refused():
    with pytest.raises(TypeError, match=r"\[1, 2\] is no iterator: it has no __next__"):
        BackgroundIterator([1, 2])
    with pytest.raises(TypeError, match=r"for a DataLoader take PrefetchLoader.of\(loader\)"):
        BackgroundIterator(DataLoader([1, 2]))


def test_a_thread_that_is_stuck_is_reported_and_ends_later(monkeypatch):
    entered, release = threading.Event(), threading.Event()

    def source():
        yield 0
        entered.set()
        release.wait(30)
        yield 1

    iterator = BackgroundIterator(source(), watch=known(False))
    assert next(iterator) == 0
    thread = threads()[0]
    assert entered.wait(30)
    monkeypatch.setattr(background._Work.end, "__defaults__", (0.05,))
    with pytest.warns(background.TurboWarning, match="still inside the next"):
        iterator.close()
    release.set()
    thread.join(5)
    assert not thread.is_alive()


def test_no_thread_asks_for_the_state_of_torchs_generator_and_nothing_is_collected_meanwhile(monkeypatch):
    asked = []
    read = torch.get_rng_state

    def noted(*args):
        asked.append((threading.current_thread(), gc.isenabled()))
        return read()

    monkeypatch.setattr(torch, "get_rng_state", noted)
    monkeypatch.setattr(producer.torch, "default_generator", types.SimpleNamespace(get_state=noted))
    iterator = BackgroundIterator(iter(range(40)), prefetch_batches=2, watch=slow())
    assert list(iterator) == list(range(40))
    assert len(asked) >= 40
    assert set(asked) == {(threading.current_thread(), False)}
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_forked_while_a_thread_reads_states_has_a_collector_and_no_lock_held():
    inside, release = threading.Event(), threading.Event()

    def read():
        with _random.uncollected():
            inside.set()
            release.wait(0.2)

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        os._exit(not (gc.isenabled() and _random._reading.acquire(timeout=1.0)))
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
    assert _random._reading.acquire(timeout=1.0)
    _random._reading.release()
