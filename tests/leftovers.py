"""Wait for threads and processes to end."""

import gc
import multiprocessing
import threading
import time


def wait_until(condition, seconds=20.0):
    """Wait until a condition is true, which another thread or process changes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (threading.enumerate(), multiprocessing.active_children())
        time.sleep(0.005)


def prefetch_threads():
    """Return the threads of this library that load batches."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("lightning_turbo-prefetch")]


def nothing_is_left():
    """Wait until no prefetching thread and no child process is left."""

    def ended():
        gc.collect()  # in each iteration, because an error that is freed late may hold an iterator
        return not multiprocessing.active_children() and not prefetch_threads()

    wait_until(ended)
