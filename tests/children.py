"""Run a function in a forked process, which the function may end."""

import os
import signal
import time
import traceback

RETURNED = 99  # exit status if the function returns or raises


def status_of_child(function, seconds=100.0):
    """Return the exit status of a forked process that runs a function, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(RETURNED)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child process did not end")
