"""Ends a measured process: its child processes end and its files are flushed, but none of its handlers run."""

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

WORKER_SECONDS = 30.0  # torch gives each worker process five seconds to exit
REST_SECONDS = 5.0
FILE: type = io.IOBase.__mro__[1]  # base class of all files; isinstance with the abstract io.IOBase is slow


def end_process(status: int = 0) -> NoReturn:
    """End this process now, from any of its threads, without running the program's handlers.

    A program that has trained for a few steps only must not save the result: ``sys.exit`` would run its ``finally:``
    and ``except:`` blocks, its ``atexit`` functions and Lightning's ``on_exception``, all of which may write weights.
    Here none of them runs, nor does any later line of the program.

    What the program has written so far is kept: the buffers of its open files are flushed. Worker processes of its
    loaders, and everything else started with ``multiprocessing``, are ended and remove their temporary files.

    Args:
        status: The exit status of the process.

    Note:
        Processes started with ``subprocess`` keep running. Data that a thread of the program still holds in memory,
        such as a logger's queue, are lost. In a notebook this ends the kernel.
    """
    try:
        _within(WORKER_SECONDS, _end_loaders)
        _within(REST_SECONDS, _end_children)
        _within(REST_SECONDS, _flush_files)
    finally:
        # An exception here, for example from a second Ctrl-C, must not reach the program's handlers either.
        os._exit(status)


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Run a function, but abandon it if it takes too long: a process that is ending must not hang."""
    worker = threading.Thread(target=lambda: _ignoring_errors(work), daemon=True)
    worker.start()
    worker.join(seconds)


def _ignoring_errors(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        work()


def _end_loaders() -> None:
    """End the worker processes of all loaders the way torch does, so that they remove their sockets."""
    kind = dataloader._MultiProcessingDataLoaderIter
    # Uses type(), because a proxy in the program may lie about its class or compute something on attribute access.
    for iterator in [each for each in gc.get_objects() if issubclass(type(each), kind)]:
        _ignoring_errors(iterator._shutdown_workers)


def _end_children() -> None:
    """End everything else started by ``multiprocessing``, and let it remove this process's temporary folder."""
    for child in multiprocessing.active_children():
        child.terminate()
    # What multiprocessing does when the interpreter exits.
    multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]


def _flush_files() -> None:
    """Flush the buffers of open files: text files first, because they write into binary ones."""
    files = [each for each in gc.get_objects() if issubclass(type(each), FILE)]
    files += [sys.stdout, sys.stderr]
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOBase)):
        _ignoring_errors(file.flush)
