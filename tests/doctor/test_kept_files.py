"""Files that hooks change at an epoch end that only the Doctor causes are restored."""

import errno
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import torch

from lightning_turbo.doctor.kept_files import KeptFiles
from tests.children import status_of_child

WRITES = {
    "torch.save": lambda path: torch.save({"steps": 17}, path),
    "torch.save of an open file": lambda path: torch.save({"steps": 17}, path.open("wb")),
    "open": lambda path: path.write_text("new"),
    "append": lambda path: path.open("a").write("new"),
    "json": lambda path: json.dump({}, path.open("w")),
    "numpy": lambda path: np.save(path.open("wb"), np.ones(3)),
    "os.open": lambda path: os.write(os.open(path, os.O_WRONLY | os.O_CREAT), b"new"),
    "remove": lambda path: path.unlink(missing_ok=True),
    "replace": lambda path: (path.with_name("part").write_text("new"), path.with_name("part").replace(path)),
    "link": lambda path: (path.unlink(missing_ok=True), path.symlink_to("other")),
    "move away": lambda path: path.exists() and path.rename(path.with_name("moved")),
    "copy": lambda path: shutil.copy(__file__, path),
}  # fmt: skip


def in_child(function):
    """Run a function in a child process, because an audit hook lasts as long as its process."""

    def run():
        function()
        os._exit(0)

    assert status_of_child(run) == 0


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_there", [True, False])
def test_written_files_are_restored(write, is_there, tmp_path):
    path = tmp_path / "final.pt"
    if is_there:
        path.write_bytes(b"weights of a long run")
    before = contents(tmp_path)

    def run():
        files = KeptFiles()
        files.begin()
        WRITES[write](path)
        files.put_back()

    in_child(run)
    assert contents(tmp_path) == before


def test_a_removed_folder_is_restored_and_later_writes_stay(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").write_bytes(b"old")

    def run():
        files = KeptFiles()
        files.begin()
        shutil.rmtree(tmp_path / "run")
        files.put_back()
        pathlib.Path(tmp_path / "report").write_text("later")
        torch.save({}, tmp_path / "saved")

    in_child(run)
    assert (tmp_path / "run" / "weights").read_bytes() == b"old"
    assert (tmp_path / "report").read_text() == "later"
    assert torch.load(tmp_path / "saved") == {}


@pytest.mark.parametrize("write", WRITES)
def test_files_that_cannot_be_copied_are_not_written(write, tmp_path, monkeypatch):
    """The disk for the copies is full."""

    def full(*given, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "final.pt"
    path.write_bytes(b"weights of a long run")
    monkeypatch.setattr(shutil, "copy2", full)

    def run():
        files = KeptFiles()
        files.begin()
        with pytest.raises(OSError, match="No space left"):
            WRITES[write](path)
        files.put_back()

    in_child(run)
    assert path.read_bytes() == b"weights of a long run"


def test_files_that_are_only_read_are_not_copied(tmp_path):
    (tmp_path / "data").write_text("read")

    def run():
        files = KeptFiles()
        files.begin()
        assert (tmp_path / "data").read_text() == "read"
        assert files._copies == {}
        files.put_back()

    in_child(run)
