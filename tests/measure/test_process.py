"""Real processes are stopped, resumed, and ended with their children; signals set flags. None imports torch."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_turbo.measure import Interrupt, InterruptedRunError, Process, ProcessError
from lightning_turbo.measure import process as module

ECHO = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
for line in sys.stdin:
    order = json.loads(line)
    if order.get("say"):
        print(order["say"], file=sys.stderr, flush=True)
    if "exit" in order:
        sys.exit(order["exit"])
    print(json.dumps({"child": child.pid, **order}), flush=True)
"""
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def state(pid):
    """Return the state of a process in /proc, or X if it does not exist."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def wait_for(states, pid):
    deadline = time.monotonic() + 30.0
    while state(pid) not in states and time.monotonic() < deadline:
        time.sleep(0.01)
    return state(pid) in states


@pytest.fixture
def start(tmp_path):
    made = []

    def begin(task, **options):
        log = tmp_path / "logs" / "process.log"
        made.append(Process(["-S", "-c", ECHO], task, log=log, folder=tmp_path, **options))
        return made[-1]

    yield begin
    for process in made:
        process.close(grace=0.0)


@needs_proc
def test_a_process_is_stopped_and_ended_together_with_its_children(start):
    process = start({"n": 1})
    child = process.listen(30.0)["child"]
    process.hold()
    process.hold()
    assert wait_for("T", child)
    process.tell({"n": 2})
    assert process.listen(30.0) == {"child": child, "n": 2}
    assert wait_for("RS", child)
    process.hold()
    process.close()
    assert wait_for("XZ", child)


@pytest.mark.parametrize(("task", "message"), [
    ({"exit": 3, "say": "goodbye"}, "ended with exit status 3: goodbye"), ({"exit": 0}, "ended with exit status 0"),
])  # fmt: skip
def test_an_ended_process_reports_its_exit_status(start, task, message):
    process = start(task)
    with pytest.raises(ProcessError, match=f"^{message}$"):
        process.listen(30.0)


def test_listen_ends_after_its_timeout_or_when_the_check_fails(start):
    process = start({"n": 1})
    process.listen(30.0)
    with pytest.raises(ProcessError, match="no answer within 0 s"):
        process.listen(0.0)
    with pytest.raises(InterruptedRunError):
        process.listen(30.0, Interrupt(-1.0).check)


@needs_proc
def test_without_sigstop_a_process_only_waits_for_orders(start, monkeypatch):
    monkeypatch.setattr(module, "CAN_HOLD", False)
    running = start({"n": 1})
    child = running.listen(30.0)["child"]
    running.hold()
    running.tell({"n": 2})
    assert running.listen(30.0) == {"child": child, "n": 2}
    assert wait_for("RS", child)


@needs_proc
def test_an_ended_process_is_closed_if_the_kernel_refuses_signals(start, monkeypatch):
    ended = start({"exit": 0})
    assert wait_for("Z", ended._process.pid)

    def as_on_macos(group, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", as_on_macos)
    ended.hold()
    ended.close()


def test_a_truncated_answer_is_ignored(tmp_path):
    made = Process(["-S", "-c", "print('{', end='')"], {}, log=tmp_path / "log", folder=tmp_path)
    with pytest.raises(ProcessError, match="ended with exit status 0"):
        made.listen(30.0)
    made.close()


def test_a_process_that_ends_before_its_first_order_reports_its_exit_status(tmp_path):
    def started_and_ended(*args, **kwargs):
        made = subprocess.Popen(*args, **kwargs)
        made.wait()
        return made

    made = Process(["-S", "-c", ""], {}, log=tmp_path / "log", folder=tmp_path, popen=started_and_ended)
    with pytest.raises(ProcessError, match=r"^ended with exit status 0$"):
        made.listen(30.0)
    made.close()


@needs_proc
def test_a_killed_program_leaves_no_process_behind(tmp_path):
    program = f"""
        import sys, time
        from pathlib import Path
        from lightning_turbo.measure import Process
        process = Process(["-S", "-c", {ECHO!r}], {{}}, log=Path("log"), folder=Path("."))
        child = process.listen(30.0)["child"]
        process.hold()
        print(child, process._process.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    paths = os.pathsep.join(filter(None, sys.path))
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}
    )
    try:
        processes = [int(pid) for pid in running.stdout.readline().split()]
        assert len(processes) == 2
    finally:
        running.kill()
        running.wait()
        running.stdout.close()
    assert all(wait_for("XZ", pid) for pid in processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_a_flag_and_the_second_stops_at_once(number):
    before = signal.getsignal(number)
    interrupt = Interrupt()
    with interrupt.caught():
        interrupt.check()
        os.kill(os.getpid(), number)
        with pytest.raises(InterruptedRunError):
            interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_process_that_closes_its_pipe_without_ending_is_reported():
    def wait(timeout):
        raise subprocess.TimeoutExpired("python", timeout)

    silent = object.__new__(Process)  # without an operating system process
    silent._lines = queue.SimpleQueue()
    silent._process = SimpleNamespace(wait=wait)
    silent._lines.put(b"")
    with pytest.raises(ProcessError, match="closed its pipe without a result"):
        silent.listen(1.0)
