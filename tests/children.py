"""Runs a function in a forked copy of this process, where it may end the process."""

import os
import signal
import time
import traceback

FORGOTTEN = 99  # the status of a function that came to its end, or raised


def status_of_child(function, seconds=100.0):
    """Return the exit status with which a function ends the forked process; minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FORGOTTEN)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child did not end")
