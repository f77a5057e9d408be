"""The start of worker processes that are not forked: long lists cross in a file, all else as with a DataLoader."""

import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_turbo.data import PrefetchLoader
from lightning_turbo.data.loading import source, worker_start
from lightning_turbo.data.loading.worker_start import LONG, LongLists, StartedWith, has_long_lists, preload


class Handle:
    """What a process gets for a file, in this process."""

    def __init__(self, lists):
        self.file = lists._file

    def detach(self):
        return os.dup(self.file.fileno())


@pytest.fixture
def arrives(monkeypatch):
    """A function that returns an object as a process that is started with it gets it, and the bytes that it is sent."""
    monkeypatch.setattr(LongLists, "handle", lambda self: self._file and Handle(self))

    def start(value, lists):
        join, (data, handle) = StartedWith(value, lists).__reduce__()
        return join(data, handle), len(data)

    return start


def names(count=LONG):
    return [f"scan {n}.nii.gz" for n in range(count)]


class Scans(Dataset):
    def __init__(self, count=LONG):
        self.items = [(name, number % 7, None) for number, name in enumerate(names(count))]
        self.again = {"files": self.items, "short": ["a", "b"]}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.items[index][1], len(self.items)


def test_long_lists_are_not_sent_with_each_process(arrives):
    data, lists = Scans(), LongLists()
    for _ in range(2):
        got, sent = arrives(data, lists)
        assert got.items == data.items
        assert got.again["files"] is got.items  # one list stays one
        assert got.again["short"] == ["a", "b"]
        assert sent < 5000
    assert len(lists._known) == 1


def change(items, rng):
    kind = rng.randrange(5)
    if kind == 0:
        items[5] = items[6]
    elif kind == 1:
        items.append(items[0])
    elif kind == 2:
        items.reverse()
    elif kind == 3:
        rng.shuffle(items)


@pytest.mark.parametrize("seed", range(5))
def test_a_list_that_has_changed_is_written_again(arrives, seed):
    rng, lists = random.Random(seed), LongLists()
    values = {"one": names(), "two": list(range(LONG)), "three": [(n, (n, "x")) for n in range(LONG)]}
    sizes = []
    for _ in range(8):
        got, _ = arrives(values, lists)
        assert got == values
        sizes.append(lists._file.seek(0, os.SEEK_END))
        changed = values[rng.choice(list(values))]
        change(changed, rng)
    assert max(sizes) <= 2.5 * sizes[0]  # the old lists do not pile up


def test_the_file_is_written_once(arrives, monkeypatch):
    written = []
    monkeypatch.setattr(pickle, "dump", lambda *args, own=pickle.dump: (written.append(1), own(*args)))
    data, lists = Scans(), LongLists()
    for _ in range(4):
        arrives(data, lists)
    assert written == [1]


@pytest.mark.parametrize(
    "items",
    [
        [[n] for n in range(LONG)],
        [{"name": n} for n in range(LONG)],
        [np.int64(n) for n in range(LONG)],
        [(n, [n]) for n in range(LONG)],
        ["x"] * (LONG - 1),
    ],
    ids=["lists", "dicts", "objects", "tuples of lists", "short"],
)
def test_other_lists_cross_as_they_are(arrives, items):
    lists = LongLists()
    got, _ = arrives([items, 3], lists)
    assert got == [items, 3]
    assert lists._file is None


def test_the_file_has_no_name(arrives, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lists = LongLists()
    arrives(Scans(), lists)
    assert lists._file.seek(0, os.SEEK_END) > 100_000
    assert os.listdir(tmp_path) == []


def test_which_objects_have_long_lists():
    class Inside:
        __slots__ = ("items",)

    class Lazy:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

        __class__ = property(lambda self: self.__getattr__("class"))

    holder = Inside()
    holder.items = names()
    scans = Scans()
    assert has_long_lists(scans)
    assert has_long_lists({"deep": [(scans,)]})
    assert not has_long_lists([Lazy(), names(5), np.arange(LONG), torch.arange(LONG), torch, Scans])
    assert not has_long_lists([[[n]] * 900 for n in range(900)])
    assert not has_long_lists(None)


def test_the_server_imports_what_its_processes_need(monkeypatch):
    asked = []
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", asked.extend)
    server = multiprocessing.forkserver.set_forkserver_preload.__self__
    monkeypatch.setattr(server, "_preload_modules", ["__main__", "theirs"])
    preload([Scans(), DataLoader.__init__, None])
    assert asked[:4] == ["__main__", "theirs", "torch", worker_start.__name__]
    assert {__name__, "torch.utils.data.dataloader"} <= set(asked)
    assert not {"builtins", None} & set(asked)


def test_a_forked_process_is_started_with_the_dataset_itself(monkeypatch):
    monkeypatch.setattr(LongLists, "place", None)
    loader = PrefetchLoader(Scans(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 2


class Changing(Scans):
    """Holds what a process can be given only while it starts, and what each process shares."""

    def __init__(self):
        super().__init__()
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.shared = torch.zeros(1).share_memory_()
        self.epoch = 0

    def __getitem__(self, index):
        with self.lock:
            self.shared += 1
        return self.items[index][1], self.epoch, len(get_worker_info().dataset.items), type(self).__name__


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_epochs_are_a_data_loaders(method):
    seen = []
    for kind in (DataLoader, PrefetchLoader):
        torch.manual_seed(0)
        data = Changing()
        loader = kind(data, batch_size=3, shuffle=True, num_workers=2, multiprocessing_context=method)
        batches = []
        for epoch in range(3):
            batches += [[part.tolist() if isinstance(part, torch.Tensor) else part for part in b] for b in loader]
            data.epoch = epoch + 1
            data.items[epoch] = ("new", 100 + epoch, None)
            data.items.append(data.items[0])
        assert data.shared.item() == 24
        seen.append(batches)
    assert seen[0] == seen[1]
    assert any(100 in batch[0] for batch in seen[1])


@pytest.mark.slow
def test_nothing_is_left_of_a_program_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    folder = tmp_path / "temporary"
    folder.mkdir()
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"started\n"
        program.send_signal(signal.SIGKILL)
        program.wait(30)
    assert [name for name in os.listdir(folder) if not name.startswith("pymp-")] == []


KILLED = """
import time
from lightning_turbo.data import PrefetchLoader
from tests.data.loading.test_worker_start import Scans

if __name__ == "__main__":
    batches = iter(PrefetchLoader(Scans(), batch_size=2, num_workers=1, multiprocessing_context="spawn"))
    next(batches)
    print("started", flush=True)
    time.sleep(60)
"""


class Locked(Scans):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_lock_of_threads_is_an_error_as_with_a_data_loader():
    with pytest.raises(TypeError, match="lock"):
        StartedWith(Locked(), LongLists()).__reduce__()


def test_lists_without_a_file_take_none_along():
    assert LongLists().handle() is None


@pytest.mark.parametrize(("method", "imported"), [("forkserver", True), ("spawn", False), ("fork", False)])
def test_only_a_server_of_processes_imports_what_they_need(method, imported, monkeypatch):
    asked = []
    monkeypatch.setattr(source, "preload", asked.append)
    data = [torch.zeros(1)] * 4
    loader = PrefetchLoader(data, 2, num_workers=1, multiprocessing_context=method, worker_init_fn=abs)
    given = source.stand_ins(loader, None, LongLists())
    assert asked == ([[data, given["collate_fn"], abs]] if imported else [])
