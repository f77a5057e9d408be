"""end_process: no handler of the program runs, its output is kept, and nothing is left behind."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lightning_turbo.measure import end_process
from tests.children import status_of_child

PROGRAM = """
    import atexit, gc, multiprocessing, os, sys, threading, time
    from concurrent.futures import ProcessPoolExecutor
    from pathlib import Path
    from torch.utils.data import DataLoader

    from lightning_turbo.measure import end_process

    class Pids:
        def __len__(self):
            return 1000
        def __getitem__(self, i):
            return os.getpid()

    def leave():
        print("a line without an end", end="")
        end_process(7)

    def note(name):
        Path(name).touch()

    class Recorded:
        def __del__(self):
            note("__del__")

    if __name__ == "__main__":
        atexit.register(note, "atexit")
        recorded = Recorded()
        text, raw = open("text", "w"), open("raw", "wb")
        text.write("kept")
        raw.write(b"kept")
        loaders = [DataLoader(Pids(), 2, num_workers=1, persistent_workers=kept) for kept in (False, True)]
        iterators = [iter(loader) for loader in loaders]
        pids = [int(next(each)[0]) for each in iterators]
        pool = ProcessPoolExecutor(1)  # after the loaders, whose processes are not to be forked beside its threads
        pids.append(pool.submit(os.getpid).result())
        Path("pids").write_text(" ".join(map(str, pids)))
        if FROZEN:
            gc.freeze()
        try:
            if THREAD:
                thread = threading.Thread(target=leave)
                thread.start()
                thread.join()
            else:
                leave()
            note("behind")
        except:
            note("except")
        finally:
            note("finally")
"""


@pytest.mark.slow  # the short form is in tests/tune/test_worker.py
@pytest.mark.parametrize("thread", [False, True])
def test_end_process_runs_no_handler_and_leaves_nothing_behind(thread, tmp_path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "train.py").write_text(
        textwrap.dedent(PROGRAM.replace("FROZEN", "False").replace("THREAD", f"{thread}"))
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stdout == "a line without an end"
    assert {each.name for each in tmp_path.iterdir()} == {"train.py", "temporary", "text", "raw", "pids"}
    assert [(tmp_path / name).read_text() for name in ("text", "raw")] == ["kept", "kept"], "buffers are flushed"
    assert list((tmp_path / "temporary").iterdir()) == [], "sockets of the worker processes are removed"
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_workers_end_if_the_garbage_collector_does_not_track_their_loader(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM.replace("FROZEN", "True").replace("THREAD", "False")))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 7, done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"train.py", "text", "raw", "pids"}
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_child_processes_of_the_program_are_ended():
    def leave():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        Path("pid").write_text(str(child.pid))
        end_process(7)

    assert status_of_child(leave) == 7
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)
