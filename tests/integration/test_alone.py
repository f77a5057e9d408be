"""Checkpoints that are written when a run is stopped: by all ranks together, and by one that an error left alone."""

import inspect
from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.connectors import signal_connector

from lightning_turbo import _distributed
from tests.ranks import run_ranks

WORKER = Path(__file__).with_name("alone_worker.py")


@pytest.mark.distributed
def test_a_stopped_run_leaves_its_checkpoint(tmp_path):
    run_ranks(WORKER, "alone", tmp_path)
    assert (tmp_path / "alone.ckpt").exists()
    alone = torch.load(tmp_path / "alone")
    assert any("the error of rank 0" in error for error in alone["errors"])
    assert len(alone["warnings"]) == 3  # gradients, window and loaders
    assert all("without those of the other ranks" in warning for warning in alone["warnings"])

    run_ranks(WORKER, "together", tmp_path)
    for rank in (0, 1):
        straight, again, from_alone = (
            torch.load(tmp_path / f"{name}.{rank}") for name in ("straight", "again", "from_alone")
        )
        assert straight["steps"] == again["steps"] == from_alone["steps"] == 6
        assert len(straight["seen"]) == 20
        assert again["seen"] == straight["seen"][6:]
        assert all(torch.equal(again["module"][name], value) for name, value in straight["module"].items())
        assert bool(from_alone["warnings"]) == (rank == 0)


@pytest.mark.distributed
def test_ranks_at_different_batches_have_nothing_in_common_where_they_were_stopped(tmp_path):
    run_ranks(WORKER, "places", tmp_path)
    zero, one = (torch.load(tmp_path / f"places.{rank}") for rank in (0, 1))
    assert (zero["ordinary"], one["ordinary"]) == ([0, 1], [1, 1])  # only rank 0 writes
    assert (zero["stopped"], one["stopped"]) == ([0], [1])
    assert zero["same"] == one["same"] == [0, 1]
    assert len(zero["said"]) == 1
    assert "which are at other batches" in zero["said"][0]
    assert not one["said"]


def test_a_checkpoint_from_a_signal_handler_may_be_of_one_rank_alone():
    assert not _distributed._may_be_alone()
    handler = inspect.getsource(signal_connector)
    assert f"def {_distributed.SIGNAL_HANDLER}" in handler  # Lightning's, whichever version
    there = {}
    exec(f"def {_distributed.SIGNAL_HANDLER}(): return ask()", {"ask": _distributed._may_be_alone}, there)
    assert there[_distributed.SIGNAL_HANDLER]()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert _distributed._may_be_alone()
