"""The end of a process that was measured: its own processes end, its files are flushed, no handler of it runs."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from torch.utils.data import dataloader

__all__ = ["end_process"]

WORKER_SECONDS = 30.0  # torch gives each worker process five to end by itself
REST_SECONDS = 5.0
FILE: type = io.IOBase.__mro__[1]  # of all files; the abstract class above it takes long to ask


def end_process(status: int = 0) -> NoReturn:
    """End this process now, from any of its threads, without the handlers of the program that runs in it.

    A program that was trained for some steps only must not save what it has: ``sys.exit`` would run its ``finally:``
    and ``except:`` blocks, its functions of ``atexit``, and Lightning's ``on_exception``, all of which may write
    weights. None of them runs here, nor does anything behind the line that is executed.

    What the program has written so far is kept: the buffers of its open files are flushed. The worker processes of its
    loaders and whatever else it started by ``multiprocessing`` are ended, and remove their temporary files.

    Args:
        status: The exit status of the process.

    Note:
        Processes that were started by ``subprocess`` go on. What a thread of the program still holds in memory, as the
        queue of a logger, is lost. In a notebook this ends the kernel.
    """
    try:
        _within(WORKER_SECONDS, _end_loaders)
        _within(REST_SECONDS, _end_children)
        _within(REST_SECONDS, _flush_files)
    finally:
        # Whatever is raised here, as by a second Ctrl-C, must not reach the program's handlers either.
        os._exit(status)


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do something, but leave it behind if it takes too long: a process that ends must not hang."""
    worker = threading.Thread(target=lambda: _ignoring_errors(work), daemon=True)
    worker.start()
    worker.join(seconds)


def _ignoring_errors(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        work()


def _end_loaders() -> None:
    """End the worker processes of all loaders, as torch ends them: they remove the sockets that they made."""
    kind: type | None = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
    if kind is not None:
        # A proxy of the program's may lie about its class and compute something where it is asked for an attribute.
        for iterator in [each for each in gc.get_objects() if issubclass(type(each), kind)]:
            _ignoring_errors(iterator._shutdown_workers)


def _end_children() -> None:
    """End what else ``multiprocessing`` has started, and let it remove the temporary folder of this process."""
    for child in multiprocessing.active_children():
        child.terminate()
    # What multiprocessing would do at the end of the interpreter.
    multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]


def _flush_files() -> None:
    """Write what is in the buffers of open files: first of text, which goes on into those of bytes."""
    files = [each for each in gc.get_objects() if issubclass(type(each), FILE)]
    files += [sys.stdout, sys.stderr]
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOBase)):
        _ignoring_errors(file.flush)
