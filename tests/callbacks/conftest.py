import pytest


@pytest.fixture
def _no_tqdm_monitor(monkeypatch):
    """Lightning's finder shows a bar of tqdm, which keeps a thread for the process."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
