import pytest


@pytest.fixture
def _no_tqdm_monitor(monkeypatch):
    """Lightning's finder shows a tqdm progress bar, whose monitor thread outlives it."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
