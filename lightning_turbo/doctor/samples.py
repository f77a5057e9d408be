"""Samples of the stack: in which of the user's lines the time goes, in this process and in worker processes."""

from __future__ import annotations

import dis
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lightning_turbo._lightning import LightningModule
from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.doctor.source import kind_of, package_of

__all__ = ["Line", "Sampler", "WorkerSamples"]

EVERY = 1e-3
"""Seconds between two samples."""
WRITTEN = 0.1
"""Seconds after which a worker process writes its samples again."""
_RESUME = dis.opmap.get("RESUME")  # the instruction with which a function begins, since Python 3.11
_LOG = LightningModule.log.__code__


class Line(NamedTuple):
    """Where a sample was taken.

    Attributes:
        file: The user's file; empty if no line of the user's was running.
        line: Its line.
        function: The function that the line is in.
        call: The function that the line has called, if that is a Python function.
        kind: "network" if it calls a module, or what Lightning and torch's optimizers and loaders do by themselves,
            "torch" for another function of torch, "library" for one of another library, ``self.log`` and all in a
            metric of torchmetrics, "direct" for the line itself and for functions in C.
        in_network: Whether the line is in a module that the user's step has called.
        logs: Whether it was in ``self.log``.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    call: str = ""
    kind: str = "direct"
    in_network: bool = False
    logs: bool = False


NOWHERE = Line()


class Sampler:
    """Counts the seconds of the user's lines, from ``start`` to ``stop``, with a sample every millisecond.

    Where it starts in the main thread and nobody uses ``SIGALRM``, a timer interrupts that thread; a sample counts the
    time since the one before, because Python handles a signal only after a call of C code. ``stop`` puts the handler
    back. Elsewhere a thread looks at the stack. It waits up to 5 ms for the GIL, so that a short loop in pure Python
    may be counted for the next line that lets it run, and be missed.

    Args:
        adopted: Packages whose lines count where no line outside of installed packages is running.
        base: The frame at which a stack ends, that of the caller of ``fit``; ``None`` for the whole stack.
        mark: Returns what the time is counted for: the moment of the fit.
    """

    def __init__(self, adopted: frozenset[str], base: FrameType | None, mark: Callable[[], int]) -> None:
        self.seconds: defaultdict[tuple[int, Line], float] = defaultdict(float)
        self.computing: defaultdict[tuple[int, Line], float] = defaultdict(float)  # of these, the thread's CPU time
        self.by_thread = False  # whether a thread looks, and not a signal
        self.is_started = False
        self.is_paused = False
        self.lost = False  # whether samples are missing: the program has taken the signal, or an error occurred
        self._adopted = adopted
        self._base = base
        self._mark = mark
        self._thread = threading.get_ident()
        self._cpu_time = _cpu_time_of(self._thread)
        self._before: Any = None  # the handler that was set before
        self._ends = threading.Event()
        self._looker: threading.Thread | None = None
        self._last = (0.0, 0.0)
        self._is_counting = False

    def start(self) -> None:
        """Start."""
        self.is_started = True
        self._last = (time.perf_counter(), self._cpu_time())
        if _has_free_signal():
            self._before = signal.signal(signal.SIGALRM, self._on_signal)
            signal.siginterrupt(signal.SIGALRM, False)
            signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
            return
        self.by_thread = True
        self._looker = threading.Thread(target=self._look, daemon=True)
        self._looker.start()

    def stop(self) -> None:
        """Stop; the timer and its handler are again as they were, unless the program has set its own since."""
        self._base = None
        if self._looker is not None:
            self._ends.set()
            self._looker.join(1.0)
        elif self._before is not None and threading.current_thread() is threading.main_thread():
            if self._is_mine():
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, self._before)
            else:
                self.lost = True
            self._before = None

    def pause(self) -> None:
        """Count nothing until ``resume``."""
        self.is_paused = True

    def resume(self) -> None:
        """Count again, from now on."""
        self._last = (time.perf_counter(), self._cpu_time())
        self.is_paused = False

    def _is_mine(self) -> bool:
        return getattr(signal.getsignal(signal.SIGALRM), "__self__", None) is self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_counting:  # a signal may arrive while another one is handled
            self._is_counting = True
            try:
                self._sample(frame)
            finally:
                self._is_counting = False

    def _look(self) -> None:
        while not self._ends.wait(EVERY):
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                self._sample(frame)

    def _sample(self, frame: FrameType | None) -> None:
        try:
            self._count(frame)
        except Exception:  # an error of this package's own must not reach the program
            self.is_paused = self.lost = True

    def _count(self, frame: FrameType | None) -> None:
        now, cpu, last = time.perf_counter(), self._cpu_time(), self._last
        if not self.is_paused:
            line = self.find(frame)
            if not line.file and (other := self._line_of_a_thread(frame)) is not None:
                line = other
            key = self._mark(), line
            self.seconds[key] += now - last[0]
            self.computing[key] += cpu - last[1]
        # What the sample itself has computed would make a line that sleeps look as if it computed.
        self._last = (now, self._cpu_time())

    def _line_of_a_thread(self, frame: FrameType | None) -> Line | None:
        """Return the line of a thread that loads while this one waits for its batch, if one does."""
        if not any(_loads(each) for each in _stack(frame, self._base)):
            return None
        others = (each for ident, each in sys._current_frames().items() if ident != self._thread)
        lines = (self.find(each) for each in others if any(_loads(one) for one in _stack(each, None)))
        return next((line for line in lines if line.file), None)

    def find(self, frame: FrameType | None) -> Line:
        """Return the innermost line of the user's own on a stack, otherwise the innermost adopted one."""
        if frame is not None and _has_just_begun(frame):
            frame = frame.f_back  # the time was spent before this call
        found, adopted = NOWHERE, None
        inner: list[FrameType] = []
        logs = False
        for each in _stack(frame, self._base):
            file = each.f_code.co_filename
            kind = kind_of(file)
            if kind == "own":
                found = self._line(each, inner)
                break
            if adopted is None and package_of(file) in self._adopted:
                adopted = self._line(each, inner)
            logs = logs or each.f_code is _LOG
            inner.append(each)
        found = found if found.file else adopted or NOWHERE
        return found._replace(logs=logs) if found.file else found

    def _line(self, frame: FrameType, inner: list[FrameType]) -> Line:
        called = [each for each in inner if not each.f_code.co_filename.startswith("<")]
        code, within = frame.f_code, _within(frame, self._base)
        return Line(
            file=code.co_filename,
            line=frame.f_lineno or code.co_firstlineno,
            function=code.co_name,
            call=called[-1].f_code.co_name if called else "",
            kind="library" if within == "metric" else _kind_of_call(called),
            in_network=within == "network",
        )


def _cpu_time_of(thread: int) -> Callable[[], float]:
    """Return a function that returns the CPU time of a thread of this process, in seconds; of the process on Windows.

    Threads of OpenMP, which spin for a while after their work, would make a line that sleeps look as if it computed.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    return partial(time.clock_gettime, time.pthread_getcpuclockid(thread))


def _has_free_signal() -> bool:
    """Return whether this is the main thread, and the program uses neither the signal nor its timer."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGALRM)
    # A forked process has the handler of the one that it was forked from, without a timer.
    is_free = handler in (signal.SIG_DFL, signal.SIG_IGN) or isinstance(getattr(handler, "__self__", None), Sampler)
    return is_free and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def _stack(frame: FrameType | None, base: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame is not base:
        yield frame
        frame = frame.f_back


def _has_just_begun(frame: FrameType) -> bool:
    """Return whether a frame is at the instruction with which a function begins, where Python handles signals."""
    return _RESUME is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _RESUME


def _is_call_of_module(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("_wrapped_call_impl", "_call_impl") and "torch" in frame.f_code.co_filename


def _kind_of_call(called: list[FrameType]) -> str:
    """Return the kind of what a line has called, innermost first; see ``Line``."""
    if not called:
        return "direct"
    packages = [package_of(each.f_code.co_filename) for each in called]
    if any(each.f_code is _LOG for each in called):
        return "library"
    if kind_of(called[-1].f_code.co_filename) == "machinery":
        return "network"
    if packages[-1] != "torch" or "torchmetrics" in packages:
        return "library"
    return "network" if _is_call_of_module(called[-1]) else "torch"


def _within(frame: FrameType, base: FrameType | None) -> str:
    """Return what was called between Lightning and this frame: "metric" of torchmetrics, "network" for a module."""
    for each in _stack(frame, base):
        if package_of(each.f_code.co_filename) == "torchmetrics":
            return "metric"
        if kind_of(each.f_code.co_filename) == "machinery":
            return ""
        if _is_call_of_module(each):
            return "network"
    return ""


def _loads(frame: FrameType) -> bool:
    """Return whether a frame is one of torch's or this package's loaders."""
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(("torch.utils.data", "lightning_turbo.data.loading"))


class WorkerSamples:
    """Samples of the worker processes of a Trainer's loaders.

    From ``watch`` to ``stop``, each worker process that a loader starts samples itself and writes what it found to a
    temporary folder, until ``stop`` removes the folder.

    Args:
        adopted: As for ``Sampler``.
    """

    def __init__(self, adopted: frozenset[str]) -> None:
        self._adopted = adopted
        self._folder = tempfile.TemporaryDirectory(prefix="lightning_turbo_doctor_", ignore_cleanup_errors=True)
        self._loaders: list[Any] = []
        self._replaced: list[ReplacedMethod] = []

    def watch(self, loader: Any) -> None:
        """Sample the worker processes that a loader will start."""
        if getattr(loader, "num_workers", 0) and hasattr(loader, "_get_iterator"):
            start = _Start(self._folder.name, len(self._loaders), self._adopted)
            self._loaders.append(loader)
            self._replaced.append(ReplacedMethod(loader, "_get_iterator", _Starting(loader, start)))

    def read(self, loader: Any) -> dict[Line, float]:
        """Return the seconds of all worker processes of a loader in each line so far."""
        number = next((number for number, each in enumerate(self._loaders) if each is loader), -1)
        sums: defaultdict[Line, float] = defaultdict(float)
        for path in Path(self._folder.name).glob(f"{number}-*.json"):
            for *line, seconds in json.loads(path.read_text("utf-8")):
                sums[Line(*line)] += seconds
        return sums

    def stop(self) -> None:
        """Sample no further, here and in the processes that run."""
        for each in self._replaced:
            each.put_back()
        self._replaced, self._loaders = [], []
        self._folder.cleanup()


class _Starting:
    """A loader's method that makes its iterator, with a ``worker_init_fn`` that also starts to sample."""

    def __init__(self, loader: Any, start: _Start) -> None:
        self._loader = loader
        self._start = start

    def __call__(self, make: Callable[[], Any]) -> Any:
        loader, before = self._loader, self._loader.worker_init_fn
        loader.worker_init_fn = _Start(self._start.folder, self._start.number, self._start.adopted, before)
        try:
            return make()
        finally:
            loader.worker_init_fn = before


class _Start:
    """A ``worker_init_fn`` that starts to sample in a worker process, and then does what the loader's own does."""

    def __init__(self, folder: str, number: int, adopted: frozenset[str], then: Any = None) -> None:
        self.folder = folder
        self.number = number
        self.adopted = adopted
        self.then = then

    def __call__(self, worker: int) -> None:
        loop = next((each for each in _stack(sys._getframe(1), None) if each.f_code.co_name == "_worker_loop"), None)
        _WorkerSampler(Path(self.folder, f"{self.number}-{os.getpid()}.json"), self.adopted, loop).start()
        if self.then is not None:
            self.then(worker)


class _WorkerSampler(Sampler):
    """Samples a worker process, and ends where it cannot write any more."""

    def __init__(self, path: Path, adopted: frozenset[str], base: FrameType | None) -> None:
        super().__init__(adopted, base, lambda: 0)
        self._path = path
        self._written = time.perf_counter()

    def _count(self, frame: FrameType | None) -> None:
        super()._count(frame)
        if self._last[0] - self._written > WRITTEN:
            self._written = self._last[0]
            self._write()

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        rows = [[*line, seconds] for (_, line), seconds in self.seconds.items() if line.file]
        try:
            part.write_text(json.dumps(rows), "utf-8")
            part.replace(self._path)
        except OSError:  # the Doctor has left
            self.stop()
