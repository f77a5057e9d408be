"""Samples of the stack: the line that is running, whatever it calls, in this process, its threads and its workers."""

import hashlib
import signal
import threading
import time

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_turbo.doctor import samples
from lightning_turbo.doctor.lines import WAITS
from lightning_turbo.doctor.samples import Line, Sampler, WorkerSamples
from tests.integration.doctor_runs import trainer

pytestmark = pytest.mark.usefixtures("free_alarm")


def slow_python():
    total = 0
    for number in range(400_000):
        total += number * number
    return total


def slow_numpy():
    matrix = np.ones((300, 300)) / 300
    for _ in range(20):
        matrix = np.linalg.matrix_power(matrix, 3)


def sleeps():
    time.sleep(0.1)


def sampled(function):
    """Return the sampler after a call of a function; its seconds by function."""
    sampler = Sampler(frozenset(), None, lambda: 0)
    sampler.start()
    try:
        function()
    finally:
        sampler.stop()
    sums = {}
    for (_, line), seconds in sampler.seconds.items():
        sums[line.function] = sums.get(line.function, 0.0) + seconds
    return sampler, sums


@pytest.mark.parametrize("function", [slow_python, slow_numpy, sleeps])
def test_the_time_is_counted_for_the_line_that_runs(function):
    begun = time.perf_counter()
    sampler, sums = sampled(function)
    whole = time.perf_counter() - begun
    assert sums[function.__name__] > 0.5 * whole
    assert sum(sums.values()) <= whole
    assert not sampler.by_thread
    lines = {line.line for (_, line) in sampler.seconds if line.function == function.__name__}
    first = function.__code__.co_firstlineno
    assert lines <= set(range(first, first + 5))


@pytest.mark.parametrize("by_thread", [False, True])
def test_a_line_that_sleeps_computes_hardly_anything_though_other_threads_do(by_thread, monkeypatch):
    monkeypatch.setattr(samples, "_has_free_signal", lambda free=samples._has_free_signal: not by_thread and free())
    over = threading.Event()

    def compute():
        while not over.is_set():
            hashlib.sha256(bytes(10_000_000))  # without the GIL

    other = threading.Thread(target=compute)
    other.start()
    shares = []
    try:
        for function in (sleeps, slow_python):
            sampler, _ = sampled(function)
            assert sampler.by_thread is by_thread
            shares.append(sum(sampler.computing.values()) / sum(sampler.seconds.values()))
    finally:
        over.set()
        other.join()
    assert shares[0] < min(WAITS, shares[1])


def handler(*args):
    """A program's own handler."""


@pytest.mark.parametrize("use", ["handler", "timer"])
def test_a_program_that_uses_the_signal_is_sampled_by_a_thread(use):
    before = signal.signal(signal.SIGALRM, handler if use == "handler" else signal.SIG_DFL)
    if use == "timer":
        signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        sampler, sums = sampled(slow_python)
        assert sampler.by_thread
        assert "slow_python" in sums
        kept = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert kept == ((handler, False) if use == "handler" else (signal.SIG_DFL, True))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_run_in_a_thread_is_sampled_by_another_one():
    found = []
    thread = threading.Thread(target=lambda: found.append(sampled(slow_python)))
    thread.start()
    thread.join()
    ((sampler, sums),) = found
    assert sampler.by_thread
    assert "slow_python" in sums


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_handler_and_the_timer_are_put_back(before):
    kept = signal.signal(signal.SIGALRM, before)
    try:
        sampled(sleeps)
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, kept)


def test_a_signal_that_the_program_takes_meanwhile_stays_its_own():
    before = signal.getsignal(signal.SIGALRM)
    try:
        sampler, _ = sampled(lambda: (signal.setitimer(signal.ITIMER_REAL, 0), signal.signal(signal.SIGALRM, handler)))
        assert sampler.lost
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("by_thread", [False, True])
def test_an_error_while_sampling_does_not_reach_the_program(by_thread, monkeypatch):
    monkeypatch.setattr(samples, "_has_free_signal", lambda free=samples._has_free_signal: not by_thread and free())
    monkeypatch.setattr(samples, "kind_of", lambda file: 1 / 0)
    sampler, sums = sampled(sleeps)
    assert sampler.lost
    assert sampler.by_thread is by_thread
    assert sums == {}


def test_a_paused_sampler_counts_nothing():
    sampler = Sampler(frozenset(), None, lambda: 0)
    sampler.start()
    try:
        sampler.pause()
        sleeps()
        sampler.resume()
        assert sum(sampler.seconds.values()) < 0.05
    finally:
        sampler.stop()


class Block(nn.Module):
    def forward(self, x):
        self.line = samples_here()
        return x


def samples_here(base=None):
    import sys

    return Sampler(frozenset(), base, lambda: 0).find(sys._getframe(1))


def test_a_line_in_a_module_that_a_line_calls_is_in_the_network():
    block = Block()
    assert not samples_here().in_network
    block(torch.ones(1))
    assert (block.line.function, block.line.in_network, block.line.kind) == ("forward", True, "direct")


class Distance(torchmetrics.Metric):
    def update(self, x):
        self.line = samples_here()

    def compute(self):
        return torch.zeros(())


def test_a_line_in_a_metric_of_the_user_is_not_the_networks_work():
    metric = Distance()
    metric(torch.ones(1))
    assert (metric.line.function, metric.line.in_network, metric.line.kind) == ("update", False, "library")


def frames_of(call, *files):
    """Return the line that is found where library code in some files calls a function."""
    found = []
    names = {"call": lambda: found.append(samples_here_behind())}
    for file in files:
        names = {"call": _compiled(file, names["call"])}
    call(names["call"])
    return found[0]


def _compiled(file, call):
    names = {"inner": call}
    exec(compile("def outer():\n    inner()\n", file, "exec"), names)
    return names["outer"]


def samples_here_behind():
    import sys

    # The frames of this file inside of the library are not the user's.
    return Sampler(frozenset(), None, lambda: 0).find(sys._getframe(2))


TORCH = torch.__file__.replace("__init__.py", "{}")


@pytest.mark.parametrize(("file", "kind"), [
    (TORCH.format("nn/functional.py"), "torch"), (TORCH.format("optim/adam.py"), "network"),
    (TORCH.format("utils/data/_utils/collate.py"), "network"), ("/x/site-packages/lightning/pytorch/a.py", "network"),
    ("/x/site-packages/torchmetrics/metric.py", "library"), ("/x/site-packages/cv2/__init__.py", "library"),
])  # fmt: skip
def test_what_a_line_calls_has_a_kind(file, kind):
    line = frames_of(lambda call: call(), file)
    assert line.kind == kind
    assert line.file == __file__
    assert line.call == "outer"


def test_lines_of_an_adopted_package_count_where_no_own_line_runs():
    import sys

    names = {"frame": sys._getframe}
    exec(compile("def work():\n    return frame()\n", "/x/site-packages/pack/model.py", "exec"), names)
    frame = names["work"]()
    assert Sampler(frozenset(), sys._getframe(), lambda: 0).find(frame).file == ""
    found = Sampler(frozenset({"pack"}), sys._getframe(), lambda: 0).find(frame)
    assert (found.file, found.function) == ("/x/site-packages/pack/model.py", "work")


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        slow_python()
        return torch.ones(2)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_are_sampled(context):
    loader = DataLoader(Rows(), 2, num_workers=1, multiprocessing_context=context)
    before = dict(vars(loader))
    workers = WorkerSamples(frozenset())
    workers.watch(loader)
    assert len(list(loader)) == 12
    found = workers.read(loader)
    workers.stop()
    slow = sum(seconds for line, seconds in found.items() if line.function == "slow_python")
    assert slow > 0.5 * sum(found.values()) > 0
    assert {type(line) for line in found} == {Line}
    assert vars(loader) == before, "the loader is as it was"
    assert len(list(loader)) == 12


def test_the_worker_init_fn_of_a_loader_is_called():
    def start(worker):
        Rows.__getitem__ = lambda self, index: torch.full((2,), float(worker + 7))

    kept = Rows.__getitem__
    loader = DataLoader(Rows(), 2, num_workers=1, worker_init_fn=start, multiprocessing_context="fork")
    workers = WorkerSamples(frozenset())
    workers.watch(loader)
    assert next(iter(loader)).unique().tolist() == [7.0]
    workers.stop()
    assert loader.worker_init_fn is start
    assert Rows.__getitem__ is kept


def test_a_loader_of_another_kind_and_one_without_workers_are_left_alone():
    workers = WorkerSamples(frozenset())
    for loader in (DataLoader(Rows()), [1, 2]):
        before = dict(getattr(loader, "__dict__", {}))
        workers.watch(loader)
        assert getattr(loader, "__dict__", {}) == before
        assert workers.read(loader) == {}
    workers.stop()


def test_log_is_logging_wherever_it_is_called():
    found = []

    class Logs(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("loss", Lazy())
            return super().training_step(batch, batch_idx)

    class Lazy(float):
        def __float__(self):
            return 0.0

    real = samples.LightningModule.log

    class Model(Logs):
        pass

    import sys

    def look(frame, event, arg):
        if event == "call" and frame.f_code is real.__code__:
            found.append(Sampler(frozenset(), None, lambda: 0).find(frame))

    sys.setprofile(look)
    try:
        trainer(limit_train_batches=2, limit_val_batches=0).fit(Model())
    finally:
        sys.setprofile(None)
    assert {(line.function, line.logs, line.kind) for line in found if line.logs} <= {
        ("training_step", True, "library")
    }
