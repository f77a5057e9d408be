"""Files that are written whole or not at all."""

import os

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
