"""The background thread: what it hands over, and that it always ends."""

import contextvars
import gc
import sys
import threading
import time
import weakref

import pytest
import torch

from lightning_turbo.data import randomness, surroundings
from lightning_turbo.data.background import BackgroundIterator
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
def test_hands_over_every_item_in_order_and_ends(length, depth):
    iterator = BackgroundIterator(iter(range(length)), prefetch_batches=depth)
    assert list(iterator) == list(range(length))
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
def test_keeps_so_many_ready_and_not_more(depth):
    made = []
    iterator = BackgroundIterator(counting(made), prefetch_batches=depth)
    assert [next(iterator), next(iterator), next(iterator)] == [0, 1, 2]
    # Handed out: 3. Ready: depth. In the thread's hands, waiting for room: 1.
    wait_until(lambda: len(made) == 3 + depth + 1)
    time.sleep(0.05)
    assert len(made) == 3 + depth + 1
    iterator.close()


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


def test_parking_ends_the_thread_and_loses_nothing():
    iterator = BackgroundIterator(counting([], 30), prefetch_batches=3)
    got = [next(iterator) for _ in range(4)]
    assert iterator.park()
    assert not threads()
    got += [next(iterator) for _ in range(6)]
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


def test_no_batch_is_kept_by_the_thread():
    kept = []

    def source():
        for n in range(6):
            batch = torch.full((3,), n)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    iterator = BackgroundIterator(source(), prefetch_batches=1)
    for n, batch in enumerate(iterator):
        assert int(batch[0]) == n
    del batch
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_errors_come_at_their_item_with_their_traceback(error, place):
    def broken():
        for n in range(8):
            if n == place:
                raise error
            yield n

    iterator = BackgroundIterator(broken(), prefetch_batches=2)
    got = []
    with pytest.raises(type(error)) as caught:
        got.extend(item for item in iterator if got.append(item))
    assert got == list(range(place))
    assert caught.value is error
    assert "broken" in [entry.name for entry in caught.traceback]
    assert not threads()
    assert list(iterator) == []  # a generator is dead after an error


def test_a_source_that_survives_an_error_goes_on():
    class Source:
        n = -1

        def __next__(self):
            self.n += 1
            if self.n in (1, 4):
                raise ValueError(self.n)
            if self.n == 7:
                raise StopIteration
            return self.n

    iterator = BackgroundIterator(Source(), prefetch_batches=2)
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

    source = iter(range(5))
    iterator = BackgroundIterator(source, stage=stage, snapshot=lambda: f"after {where[-1][:4]} {len(where)}")
    iterator.add_stage(lambda item: item + 1)
    assert iterator.place.state is None
    got = [(item, iterator.place.state.split()[-1]) for item in iterator]
    assert got == [(1, "1"), (11, "2"), (21, "3"), (31, "4"), (41, "5")]
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
def test_the_callers_modes_reach_the_thread(context):
    def source():
        for _ in range(6):
            yield modes()

    variable.set("mine")
    with context():
        here = modes()
        got = list(BackgroundIterator(source(), watch=known(False)))
    assert got == [here] * 6
    assert here != modes()


def known(value):
    watch = LoadWatch()
    watch.known, watch.slow = value, True
    return watch


def test_the_switch_interval_is_shortened_and_put_back():
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


def test_a_switch_interval_that_the_program_sets_is_left_alone():
    before = sys.getswitchinterval()
    iterator = BackgroundIterator(counting([]), watch=known(False))
    next(iterator)
    wait_until(lambda: sys.getswitchinterval() != before)
    try:
        sys.setswitchinterval(0.002)
        iterator.close()
        assert sys.getswitchinterval() == pytest.approx(0.002)
    finally:
        sys.setswitchinterval(before)


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
                torch.rand(1)
            yield n, threading.current_thread() is threading.main_thread()

    with pytest.warns(NoEffectWarning, match="this run may not repeat"):
        got = list(BackgroundIterator(source(), prefetch_batches=1))
    assert [n for n, _ in got] == list(range(12))
    assert got[-1][1]
    assert not threads()


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


def test_a_thread_that_is_stuck_is_reported_and_ends_later(monkeypatch):
    import lightning_turbo.data.background as background

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
