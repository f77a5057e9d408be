"""Errors about unknown arguments suggest the intended one."""

import pytest

from lightning_turbo import Prefetch


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("workers", "num_workers"), ("num_worker", "num_workers"), ("thread", "threads"), ("num_threads", "threads"),
        ("prefetch_factor", "prefetch_batches"), ("depth", "prefetch_batches"), ("seed", "sample_seeds"),
        ("sample_seed", "sample_seeds"), ("pin_memory", "device_prefetch"), ("transform", "device_transform"),
        ("persistent_worker", "persistent_workers"), ("resume", "exact_resume"),
    ],
)  # fmt: skip
def test_an_unknown_keyword_gets_a_suggestion(given, meant):
    with pytest.raises(TypeError, match=f"Prefetch has no argument {given}; did you mean {meant}?"):
        Prefetch(**{given: 1})
    with pytest.raises(TypeError, match=r"Prefetch has no argument xyz\. It takes prefetch_batches, threads"):
        Prefetch(xyz=1)
