"""The same samples, augmentation included, whatever loads them: processes, threads and ranks."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

seeds_worker = pytest.importorskip("tests.integration.seeds_worker", reason="needs MONAI and torchdata")

LENGTH = 1000
WORKER = Path(__file__).with_name("seeds_worker.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*set_vital", "ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Loading a batch draws", "ignore:threads=4 has no effect"),
]


def settings_of_one_process():
    forms = itertools.product(("plain", "prefetch", "threads"), (1, 2, 4), (False, True))
    for kind in ("plain", "prefetch", "threads"):
        yield {"kind": kind}
    for kind, num_workers, persistent in forms:
        yield {"kind": kind, "num_workers": num_workers, "persistent": persistent, "context": "fork"}
    for kind, num_workers, context in itertools.product(("plain", "prefetch"), (1, 2), ("forkserver", "spawn")):
        yield {"kind": kind, "num_workers": num_workers, "persistent": num_workers > 1, "context": context}
    for kind in ("shuffled", "subset", "batch sampler", "single", "stateful", "monai", "of"):
        yield {"kind": kind, "num_workers": 1, "batch_size": 5}


def settings_of_two_ranks():
    for kind in ("plain", "prefetch"):
        yield {"kind": kind}
        for num_workers, persistent in itertools.product((1, 2, 4), (False, True)):
            yield {"kind": kind, "num_workers": num_workers, "persistent": persistent}


def by_index(rows):
    return torch.stack([epoch[epoch[:, 0].argsort()] for epoch in rows])


@pytest.fixture(scope="module")
def expected():
    torch.set_num_threads(1)
    return seeds_worker.load(LENGTH, batch_size=50)


@pytest.mark.parametrize("settings", list(settings_of_one_process()), ids=lambda s: "-".join(map(str, s.values())))
def test_one_process(expected, settings):
    rows = seeds_worker.load(LENGTH, **settings)
    assert torch.equal(by_index(rows), by_index(expected))
    if settings["kind"] not in ("shuffled", "batch sampler"):
        assert torch.equal(rows, expected)


@pytest.mark.distributed
def test_two_ranks(expected, tmp_path):
    every = list(settings_of_two_ranks())
    run_ranks(WORKER, tmp_path, LENGTH, *map(json.dumps, every), timeout=600)
    for number, settings in enumerate(every):
        first, second = (torch.load(tmp_path / f"{number}_{rank}.pt") for rank in (0, 1))
        dealt = torch.stack([first, second], 2).flatten(1, 2)
        assert torch.equal(dealt, expected), settings
