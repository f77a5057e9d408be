"""The start time of this process."""

import os
import time

import pytest

from lightning_turbo.doctor import ranks


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_the_start_time_of_a_process_is_before_its_imports():
    assert 0.0 < time.time() - ranks.start_of_process() < 24 * 3600
    assert ranks.start_of_process() == pytest.approx(ranks.start_of_process(), abs=0.1)


def test_without_proc_the_start_time_of_a_process_is_now(monkeypatch):
    def fail(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(ranks, "open", fail, raising=False)
    before = time.time()
    assert before <= ranks.start_of_process() <= time.time()
