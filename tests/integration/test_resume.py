"""N steps straight equal k steps, a checkpoint, a new process and N - k steps: zero differing bits."""

from pathlib import Path

import pytest
import torch

from tests.integration.resume_worker import MOMENTS, OPTIMIZERS
from tests.ranks import run_ranks

WORKER = Path(__file__).with_name("resume_worker.py")
LEVELS = ("O0", "O1", "O2", "O3")
ALL = [f"{level}-{optimizer}-bfloat16" for level in LEVELS for optimizer in OPTIMIZERS]
QUICK = ["O0-sgd-bfloat16", "O1-adamw_fused-float16", "O2-adam-bfloat16", "O2-sgd-float16", "O3-adamw-bfloat16"]
SCALED = [f"{level}-{optimizer}-float16" for level in ("O1", "O2") for optimizer in OPTIMIZERS]


def assert_same(a, b, path=""):
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{index}")
    else:
        assert a == b, path


def check(folder, cases, ranks):
    for how in ("straight", "resumed"):
        run_ranks(WORKER, how, folder, ",".join(cases), ranks=ranks)
    for case in cases:
        for rank in range(ranks):
            straight = torch.load(folder / case / f"straight.final.{rank}", weights_only=True)
            assert straight["step"] == 6
            if case.split("-")[2] == "float16" and case[:2] in ("O1", "O2"):
                assert straight["scale"]["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 5}
            for moment in MOMENTS:
                resumed = torch.load(folder / case / f"{moment}.final.{rank}", weights_only=True)
                assert_same(straight, resumed, f"{case}/{moment}/rank {rank}")
        if ranks > 1:
            first, second = (torch.load(folder / case / f"straight.final.{r}", weights_only=True) for r in (0, 1))
            assert_same(first["updated"], second["updated"], f"{case}: ranks differ")


def test_one_process_resumes_bit_for_bit(tmp_path):
    check(tmp_path, QUICK, ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [ALL[:8], ALL[8:], SCALED], ids=["O0-O1", "O2-O3", "scaled"])
def test_one_process_resumes_bit_for_bit_at_every_level_with_every_optimizer(cases, tmp_path):
    check(tmp_path, cases, ranks=1)


@pytest.mark.distributed
def test_two_ranks_resume_bit_for_bit(tmp_path):
    check(tmp_path, ["O1-adamw_fused-float16", "O2-sgd-float16"], ranks=2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_resume_bit_for_bit_at_every_level_with_every_optimizer(level, tmp_path):
    check(tmp_path, [case for case in (*ALL, *SCALED) if case.startswith(level)], ranks=2)
