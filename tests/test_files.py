"""Files that are written whole or not at all."""

import errno
import multiprocessing
import os
import signal
import sys

import pytest

from lightning_turbo import _files
from lightning_turbo._files import whole_file


def test_two_writers_do_not_take_each_others_file(tmp_path):
    path = tmp_path / "results.json"
    with whole_file(path) as first:
        first.write_text("first")
        with whole_file(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_what_is_no_file_stays_what_it_is(tmp_path):
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
    """Start a process that is in the middle of a write."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    writer = context.Process(target=write_until_killed, args=(path, begun))
    writer.start()
    assert begun.wait(30)
    return writer


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of files that end with a process")
def test_leftovers_of_killed_writers_are_removed_and_unfinished_files_of_living_ones_stay(tmp_path):
    killed, living = (start_writer(tmp_path / f"{name}.ckpt") for name in ("killed", "living"))
    killed.kill()
    killed.join()
    users = [tmp_path / name for name in (".notes.partial", ".killed.ckpt.elsewhere-" + "0" * 32 + ".partial")]
    for path in users:  # of the user, and of another machine
        path.write_text("")
    (held,) = tmp_path.glob(".living.ckpt.*.partial")
    with whole_file(tmp_path / "other.ckpt") as part:
        part.write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([*users, held, tmp_path / "other.ckpt"])
    living.kill()
    living.join()


def test_a_file_that_was_taken_for_left_over_before_it_was_locked_is_begun_anew(tmp_path, monkeypatch):
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


def test_a_file_system_without_locks_writes_as_well_and_removes_nothing(tmp_path, monkeypatch):
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


def test_a_link_is_replaced_where_that_is_asked_for(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with whole_file(link, follow_link=False) as part:
        part.write_text("new")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("old", "new", False)
