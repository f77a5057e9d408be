"""Files that are written completely or not at all."""

import errno
import multiprocessing
import os
import runpy
import signal
import sys

import pytest

from lightning_turbo import _files
from lightning_turbo._files import whole_file


def test_two_writers_of_the_same_file_do_not_interfere(tmp_path):
    path = tmp_path / "results.json"
    with whole_file(path) as first:
        first.write_text("first")
        with whole_file(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "elsewhere" / "target.json")
    with whole_file(link) as part:
        part.write_text("written")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "target.json").read_text() == "written"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as part:
        part.write_text("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


def write_until_killed(path, begun):
    with whole_file(path) as part:
        part.write_text("half")
        begun.set()
        signal.pause()


def start_writer(path):
    """Start a process, and return once it is in the middle of writing."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    writer = context.Process(target=write_until_killed, args=(path, begun))
    writer.start()
    assert begun.wait(30)
    return writer


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks that end with the process")
def test_partial_files_of_killed_writers_are_removed_and_those_of_running_ones_stay(tmp_path):
    killed, living = (start_writer(tmp_path / f"{name}.ckpt") for name in ("killed", "living"))
    killed.kill()
    killed.join()
    users = [tmp_path / name for name in (".notes.partial", ".killed.ckpt.elsewhere-" + "0" * 32 + ".partial")]
    for path in users:  # files of the user and of another machine
        path.write_text("")
    (held,) = tmp_path.glob(".living.ckpt.*.partial")
    with whole_file(tmp_path / "other.ckpt") as part:
        part.write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([*users, held, tmp_path / "other.ckpt"])
    living.kill()
    living.join()


def test_a_partial_file_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    lock = _files.fcntl.flock
    removed = []

    def remove_first(file, how):
        if not removed:
            removed.append(os.unlink(file.name))
        lock(file, how)

    monkeypatch.setattr(_files.fcntl, "flock", remove_first)
    with whole_file(tmp_path / "a") as part:
        part.write_text("whole")
    assert removed == [None]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_without_file_locks_files_are_written_and_nothing_is_removed(tmp_path, monkeypatch):
    writer = start_writer(tmp_path / "a")
    writer.kill()
    writer.join()

    def refuse(file, how):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(_files.fcntl, "flock", refuse)
    with whole_file(tmp_path / "b") as part:
        part.write_text("whole")
    assert (tmp_path / "b").read_text() == "whole"
    assert len(list(tmp_path.glob(".a.*.partial"))) == 1


@pytest.mark.parametrize(("raised", "named"), [
    (OSError(errno.EIO, "Input/output error"), "report.json"),
    (FileNotFoundError(errno.ENOENT, "No such file", "input.json"), "input.json"),
], ids=["without a name", "another file"])  # fmt: skip
def test_an_error_in_the_block_names_the_file_and_never_the_temporary_one(raised, named):
    with pytest.raises(OSError, match=raised.strerror) as error, whole_file("report.json"):
        raise raised
    assert error.value.filename == named
    assert os.listdir() == []


def test_windows_renames_a_closed_file_and_keeps_what_it_cannot_tell_from_a_write_in_progress(tmp_path, monkeypatch):
    """It has no file locks, does not rename an open file, and cannot flush a folder."""
    leftover = tmp_path / f".a.{_files._MACHINE}-{'0' * 32}.partial"
    leftover.touch()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "O_DIRECTORY")
    rename, written = os.replace, []

    def rename_if_closed(source, target):
        written.append(os.stat(source).st_ino)
        assert not any(os.fstat(int(number)).st_ino in written for number in open_files())
        rename(source, target)

    monkeypatch.setattr(os, "replace", rename_if_closed)
    with runpy.run_path(_files.__file__)["whole_file"](tmp_path / "a") as part:
        part.write_text("whole")
    assert len(written) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [leftover.name, "a"]
    assert (tmp_path / "a").read_text() == "whole"


def open_files():
    """Numbers of the open files of this process."""
    return [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]


def test_a_link_is_replaced_with_follow_link_false(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with whole_file(link, follow_link=False) as part:
        part.write_text("new")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("old", "new", False)
