"""What every test of a loader is checked for."""

import multiprocessing
import threading

import pytest

from tests.leftovers import nothing_is_left


@pytest.fixture(autouse=True)
def _all_ends():
    """No thread that loads and no worker process outlives its test."""
    yield
    if multiprocessing.active_children() or threading.active_count() > 1:
        nothing_is_left()
