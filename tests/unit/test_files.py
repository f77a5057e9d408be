"""Files that are written whole or not at all."""

import os
import resource

import pytest

from lightning_turbo._files import whole_file


def test_a_full_disk_leaves_what_was_there_and_names_the_file(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the system's error is that of a disk with 1000 bytes
    try:
        with pytest.raises(OSError, match=r"results\.json"), whole_file(path) as part:
            part.write_text("x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "before"


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
