"""An iterator that the garbage collector takes in the iterator's own thread, at a moment of our choice."""

import threading


def collect_in_its_thread(holder, source, seconds=0.5):
    """Drop the last reference to an iterator in its thread, which then stays where it is for a while.

    Args:
        holder: A list with that reference; it is emptied.
        source: The iterator of a DataLoader for whose worker processes the thread waits.
        seconds: How long the thread stays there.
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
