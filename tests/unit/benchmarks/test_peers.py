"""What is measured beside us is what its own documentation says, and trains as the other rows do."""

import gc

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler

from benchmarks import loaders
from benchmarks.peers import timm_loader, torchdata_loader
from benchmarks.runner import run_suites
from benchmarks.settings import BenchSettings
from lightning_turbo._optional import installed_version


class Squares(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, index):
        return index**2


class Pixels(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.full((3, 2, 2), 60 * index, dtype=np.uint8), index


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "case", "other", "tolerance"),
    [
        ("mosaicml", "Composer fp32", "PyTorch float32", 1e-4),
        # Where the loss is rounded differs by library; a bfloat16 has 8 bits.
        ("accelerate", "Accelerate bf16", "PyTorch autocast bf16", 1e-2),
    ],
)
def test_a_peer_trains_as_the_plain_loop_does(package, case, other, tolerance, tmp_path):
    if installed_version(package) is None:
        pytest.skip(f"{package} not installed")
    only = (case, other)
    settings = BenchSettings(suite="precision", device="cpu", quick=True, rounds=1, only=only, out=tmp_path / "out")
    (suite,) = run_suites(settings)["suites"]
    rows = {row["case"]: row for row in suite["rows"]}
    assert rows[case]["status"] == "ok", rows[case]["reason"]
    assert rows[case]["numbers"]["loss"] == pytest.approx(rows[other]["numbers"]["loss"], rel=tolerance)
    assert rows[case]["rounds"][0]["samples"] == rows[other]["rounds"][0]["samples"]


@pytest.mark.parametrize("method", ["thread", "process"])
def test_nodes_of_torchdata_give_whole_batches_in_order(method):
    pytest.importorskip("torchdata.nodes")
    loader = torchdata_loader(Squares(), SequentialSampler(Squares()), 4, 2, method)
    expected = [[n**2 for n in range(start, start + 4)] for start in (0, 4, 8)]
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == expected
    del loader
    gc.collect()  # ends its threads and processes


@pytest.mark.slow
def test_timm_normalises_what_its_workers_give():
    if installed_version("timm") is None:
        pytest.skip("timm not installed")
    mean, std = [0.5, 0.4, 0.3], [0.1, 0.2, 0.3]
    loader = timm_loader(Pixels(), SequentialSampler(Pixels()), 2, 0, torch.device("cpu"), mean, std)
    batches = list(loader)
    assert [labels.tolist() for _, labels in batches] == [[0, 1], [2, 3]]
    for images, labels in batches:
        for image, label in zip(images, labels, strict=True):
            channels = (60 * label / 255 - torch.tensor(mean)) / torch.tensor(std)
            torch.testing.assert_close(image, channels[:, None, None].expand(3, 2, 2))


def test_raw_photographs_are_those_that_the_data_set_normalises(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "class").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "class" / "0.jpg")
    found = []
    for raw in (False, True):
        torch.manual_seed(3)
        found.append(loaders._Pillow(tmp_path, 32, raw=raw)[0])
    (normalised, label), (pixels, same) = found
    assert label == same
    assert pixels.dtype == np.uint8
    expected = (pixels.transpose(1, 2, 0).astype(np.float32) / 255 - loaders.MEAN) / loaders.STD
    torch.testing.assert_close(normalised, torch.from_numpy(expected.transpose(2, 0, 1)))
