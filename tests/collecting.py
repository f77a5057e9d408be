"""Have the garbage collector delete an iterator in the iterator's own thread, at a chosen moment."""

import threading


def collect_in_its_thread(holder, source, seconds=0.5):
    """Drop the last reference to an iterator in its thread, and block the thread for a while.

    Args:
        holder: A list with that reference, which is cleared.
        source: The iterator of the DataLoader whose worker processes the thread waits for.
        seconds: How long the thread is blocked.
    """
    wait, go_on, collected = source._try_get_data, threading.Event(), threading.Event()

    def collecting(*timeout):
        if holder and "prefetch" in threading.current_thread().name:
            holder.clear()
            collected.set()
            go_on.wait(10)
        return wait(*timeout)

    source._try_get_data = collecting
    assert collected.wait(10)
    threading.Timer(seconds, go_on.set).start()
