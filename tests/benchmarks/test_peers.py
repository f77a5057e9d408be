"""Peers train as the plain loop does, and their loaders return the same batches."""

import gc

import pytest
from torch.utils.data import Dataset, SequentialSampler

from benchmarks.peers import monai_loader, torchdata_loader
from benchmarks.runner import Settings, measure
from lightning_turbo._optional import installed_version


class Squares(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, index):
        return index**2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("package", "case", "other", "tolerance"), [
    ("mosaicml", "Composer fp32", "PyTorch float32", 1e-4),
    # Libraries round the loss at different places; bfloat16 has 8 bits of precision.
    ("accelerate", "Accelerate bf16", "PyTorch autocast bf16", 1e-2),
])  # fmt: skip
def test_a_peer_trains_as_the_plain_loop_does(package, case, other, tolerance, tmp_path):
    if installed_version(package) is None:
        pytest.skip(f"{package} not installed")
    only = (case, other)
    settings = Settings(suite="precision", device="cpu", quick=True, rounds=1, only=only, out=tmp_path / "out")
    (suite,) = measure(settings, save=len)["suites"]
    rows = {row["case"]: row for row in suite["rows"]}
    assert rows[case]["status"] == "ok", rows[case]["reason"]
    assert rows[case]["numbers"]["loss"] == pytest.approx(rows[other]["numbers"]["loss"], rel=tolerance)
    assert rows[case]["rounds"][0]["samples"] == rows[other]["rounds"][0]["samples"]


@pytest.mark.parametrize(("package", "method"), [
    ("torchdata", "thread"), ("torchdata", "process"), ("monai", "thread"), ("monai", "none"),
])  # fmt: skip
def test_loaders_of_peers_return_the_batches_in_order(package, method):
    pytest.importorskip({"torchdata": "torchdata.nodes", "monai": "monai.data"}[package])
    sampler = SequentialSampler(Squares())
    if package == "torchdata":
        loader = torchdata_loader(Squares(), sampler, 4, 2, method)
    else:
        loader = monai_loader(Squares(), sampler, 4, 2 if method == "thread" else 0)
    expected = [[n**2 for n in range(start, start + 4)] for start in (0, 4, 8)]
    for _ in range(2):
        assert [batch.tolist() for batch in loader if len(batch) == 4] == expected
    del loader
    gc.collect()  # ends the threads and processes of the loader
