"""A check for tests of loaders."""

import multiprocessing
import threading

import pytest

from tests.leftovers import nothing_is_left


@pytest.fixture
def all_ends():
    """No thread that loads and no worker process outlives the test."""
    yield
    if multiprocessing.active_children() or threading.active_count() > 1:
        nothing_is_left()
