"""Ends amp after every test of a plain loop."""

import pytest

from lightning_turbo import amp
from lightning_turbo.amp import registration


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()
    registration._registered.clear()
