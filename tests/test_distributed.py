"""Collectives of one process, and of a rank that an error left alone; with others, integration/test_ranks.py."""

import pytest

from lightning_turbo import _distributed
from lightning_turbo._distributed import gather_for_checkpoint
from lightning_turbo.errors import TurboWarning


def test_a_process_without_others_has_its_own_data_alone():
    assert gather_for_checkpoint("own", "number", to_all=True) == ["own"]


@pytest.mark.parametrize("rank", [0, 1])
def test_of_ranks_with_an_error_only_the_one_that_writes_the_checkpoint_warns(rank, monkeypatch, recwarn):
    monkeypatch.setattr(_distributed, "rank_and_size", lambda: (rank, 2))
    try:
        raise KeyError("of this rank")
    except KeyError:
        assert gather_for_checkpoint("own", "number") == ["own"]  # there is no group: nothing was asked of others
    assert [each.category for each in recwarn] == [TurboWarning] * (rank == 0)
