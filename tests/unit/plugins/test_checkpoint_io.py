"""Checkpoints are written whole or not at all, and a write that fails says why."""

import errno
import os
import resource
import stat
from contextlib import contextmanager

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_turbo import AtomicCheckpointIO

OLD, NEW = {"step": 1, "w": torch.zeros(4)}, {"step": 2, "w": torch.ones(4), "big": torch.ones(2**20)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "last.ckpt"


@contextmanager
def files_of_at_most(size):
    """As a full disk: the system refuses to write files beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def test_a_checkpoint_is_written_read_replaced_and_removed(path):
    io = AtomicCheckpointIO()
    for checkpoint in (OLD, NEW):
        path.parent.mkdir(exist_ok=True)
        path.with_name(".last.ckpt.partial").write_bytes(b"of a run that was killed")
        io.save_checkpoint(checkpoint, path)
        loaded = io.load_checkpoint(path)
        assert loaded["step"] == checkpoint["step"]
        assert torch.equal(loaded["w"], checkpoint["w"])
        assert names(path) == ["last.ckpt"]
    io.remove_checkpoint(str(path))
    assert names(path) == []


def test_a_path_from_the_home_folder_is_written_where_it_is_read(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("HOME", str(tmp_path / "home"))
        AtomicCheckpointIO().save_checkpoint(OLD, "~/runs/last.ckpt")
        assert AtomicCheckpointIO().load_checkpoint("~/runs/last.ckpt")["step"] == 1
    assert names(tmp_path / "home" / "runs" / "last.ckpt") == ["last.ckpt"]


# In the first bytes of the file, in the middle of a tensor, and in the table at its end.
@pytest.mark.parametrize("size", [0, 100, 2**20, 2**22])
def test_a_write_that_fails_leaves_the_checkpoint_before_and_says_what_to_do(size, path):
    io = AtomicCheckpointIO()
    io.save_checkpoint(OLD, path)
    before = path.read_bytes()
    with files_of_at_most(size), pytest.raises(OSError, match=r"last\.ckpt' could not be written \(File too") as e:
        io.save_checkpoint(NEW, path)
    assert e.value.errno == errno.EFBIG
    assert "those written before are as they were. Free space or" in str(e.value)
    with pytest.raises(Exception, match=r"lambda|pickle"):
        io.save_checkpoint({"f": lambda: None}, path)
    assert path.read_bytes() == before
    assert names(path) == ["last.ckpt"]


def test_the_file_reaches_the_disk_before_it_takes_its_place_and_others_may_read_it(path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (done.append(name), real(*a))[1])
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    assert done == ["fsync", "replace", "fsync"]  # the last one is the folder's
    (plain := path.with_name("plain")).write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    with pytest.raises(OSError, match=r"plain/last\.ckpt' could not be written \((File exists|Not a directory)"):
        AtomicCheckpointIO().save_checkpoint(OLD, plain / "last.ckpt")


def test_object_stores_and_storage_options_are_left_to_lightning(path):
    io = AtomicCheckpointIO()
    io.save_checkpoint(OLD, "memory://runs/last.ckpt")
    try:
        assert io.load_checkpoint("memory://runs/last.ckpt")["step"] == 1
    finally:
        MemoryFileSystem.store.clear()
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(OLD, path, storage_options={"a": 1})
