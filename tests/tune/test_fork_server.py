"""Processes that are forked from one that has imported everything."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import Process
from lightning_turbo.tune import fork_server
from lightning_turbo.tune.fork_server import CAN_FORK, UNKNOWN, ForkServer

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="needs a system that forks")
PROGRAM = """
import json, os, sys

IMPORTED_BY = os.getpid()
print("imported")

def main():
    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order:
            sys.exit(order["end"])
        print("a word", file=sys.stderr)
        own = {"imported here": os.getpid() == IMPORTED_BY, "session": os.getsid(0), "argv": sys.argv[1:]}
        own |= {"pid": os.getpid(), "folder": os.getcwd(), "variable": os.environ["VARIABLE"]}
        print(json.dumps(own), flush=True)
"""


@pytest.fixture
def server(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "VARIABLE": "set", "PYTHONPATH": path}
    made = ForkServer(["program"], log=tmp_path / "imports.log", folder=tmp_path, environment=environment)
    yield made
    made.close()


@pytest.fixture
def start(server, tmp_path):
    """Start forked processes, and close them at the end."""
    with contextlib.ExitStack() as started:

        def start_one():
            number = len(list(tmp_path.glob("copy*.log")))
            log = tmp_path / f"copy {number}.log"
            made = Process(["-m", "program"], {}, log=log, folder=tmp_path, popen=server.popen)
            started.callback(made.close, grace=0.0)
            return made

        yield start_one


def test_forked_processes_have_the_imports_and_their_own_session_log_and_environment(start, tmp_path):
    copies = [start(), start()]
    found = [each.listen(60.0) for each in copies]
    assert len({each["pid"] for each in found}) == 2
    for each in found:
        assert each["session"] == each["pid"]
        assert (each["imported here"], each["variable"], each["argv"]) == (False, "set", [])
        assert os.path.samefile(each["folder"], tmp_path)
    assert [path.read_text() for path in sorted(tmp_path.glob("*.log"))] == ["a word\n", "a word\n", "imported\n"]


def test_the_end_of_a_forked_process_is_reported_as_that_of_any_process(start):
    for order, words in (({"end": 3}, "ended with exit status 3"), ({"end": 0}, "ended with exit status 0")):
        copy = start()
        copy.listen(60.0)
        copy.tell(order)
        with pytest.raises(Exception, match=words):
            copy.listen(60.0)
    killed = start()
    pid = killed.listen(60.0)["pid"]
    killed.hold()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Exception, match="killed by SIGKILL"):
        killed.listen(60.0)


def test_a_forked_process_is_joined_and_ended(server, tmp_path):
    with (tmp_path / "copy.log").open("wb") as log:
        copy = server.popen([sys.executable, "-m", "program"], stderr=log)
    assert copy.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        copy.wait(0.0)
    copy.kill()
    assert copy.wait() == -signal.SIGKILL
    copy.kill()
    copy.stdin.close()
    copy.stdout.close()


def test_a_late_answer_is_not_taken_for_that_of_the_next_order(server):
    server._orders.send(json.dumps({"number": -1, "start": "program"}).encode())
    assert server.ask({"start": "program"})["number"] == 0


def test_the_end_of_a_forked_process_with_a_lost_status_is_reported(server, tmp_path):
    """Ctrl-C was pressed between the order and its answer."""
    with (tmp_path / "copy.log").open("wb") as log:
        copy = server.popen([sys.executable, "-m", "program"], stderr=log)
    os.kill(copy.pid, signal.SIGKILL)
    while server.ask({"poll": copy.pid})["status"] is None:
        time.sleep(0.01)
    assert copy.wait(60.0) == UNKNOWN
    copy.stdin.close()
    copy.stdout.close()
    assert server.ask({"start": "program"})["pid"], "the server continues"


def test_a_dead_fork_server_starts_nothing_and_says_why(server, tmp_path):
    os.kill(server._process.pid, signal.SIGKILL)
    with (tmp_path / "copy.log").open("wb") as log, pytest.raises(TurboError, match="no process could be started"):
        server.popen([sys.executable, "-m", "program"], stderr=log)
    absent = ForkServer(["absent"], log=tmp_path / "absent.log", folder=tmp_path, environment={**os.environ})
    with (tmp_path / "copy.log").open("wb") as log, pytest.raises(TurboError, match="No module named 'absent'"):
        absent.popen([sys.executable, "-m", "program"], stderr=log)
    absent.close()


def test_a_fork_server_that_dies_before_its_answer_has_not_answered(server, monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.shutdown(socket.SHUT_WR)
    with ours, theirs, monkeypatch.context() as patch:
        patch.setattr(server, "_orders", ours)
        assert server.ask({"poll": 1}) == {}


def test_a_failed_fork_is_reported_and_the_server_continues(monkeypatch):
    def fork():
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(fork_server, "_fork", fork)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for number in range(2):
            ours.send(json.dumps({"number": number, "start": "program"}).encode())
        ours.shutdown(socket.SHUT_WR)
        fork_server._serve(theirs)
        found = [json.loads(ours.recv(fork_server.MESSAGE)) for _ in range(2)]
    assert found == [{"number": number, "error": "Resource temporarily unavailable"} for number in range(2)]


def test_a_fork_server_ends_with_the_program_that_started_it(tmp_path):
    (tmp_path / "maker.py").write_text(
        "import os\nfrom pathlib import Path\nfrom lightning_turbo.tune.fork_server import ForkServer\n"
        "made = ForkServer([], log=Path('log'), folder='.', environment={**os.environ})\n"
        "print(made._process.pid, flush=True)\nos._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "maker.py"]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    pid, until = int(made.stdout), time.monotonic() + 60.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
