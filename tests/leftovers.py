"""Waits for threads and processes that have to end."""

import gc
import multiprocessing
import threading
import time


def wait_until(condition, seconds=20.0):
    """Wait for something that happens in another thread or process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (threading.enumerate(), multiprocessing.active_children())
        time.sleep(0.005)


def prefetch_threads():
    """Threads of this library that load batches."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("lightning_turbo-prefetch")]


def nothing_is_left():
    """No prefetching thread and no process is left after a moment."""
    gc.collect()
    wait_until(lambda: not multiprocessing.active_children() and not prefetch_threads())
