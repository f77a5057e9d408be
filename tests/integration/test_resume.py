"""N steps straight equal k steps, a checkpoint, a new Trainer or process and N - k steps: zero differing bits."""

from pathlib import Path

import pytest
import torch

from tests.integration.resume_worker import MOMENTS, OPTIMIZERS, run_all
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


def check_resumed(case, ends):
    """The runs from each moment end as the straight one."""
    straight = ends["straight"]
    assert straight["step"] == 6
    if case.endswith("float16") and case[:2] in ("O1", "O2") and "bfloat16" not in case:
        assert straight["scale"]["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 5}
    for moment in MOMENTS:
        assert_same(straight, ends[moment], f"{case}/{moment}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", QUICK)
def test_another_trainer_resumes_bit_for_bit(case, tmp_path):
    check_resumed(case, run_all(case, tmp_path))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_other_processes_resume_bit_for_bit_at_every_level_with_every_optimizer(level, ranks, tmp_path):
    cases = [case for case in (*ALL, *SCALED) if case.startswith(level)]
    for how in ("straight", "resumed"):
        run_ranks(WORKER, how, tmp_path, ",".join(cases), ranks=ranks)
    for case in cases:
        for rank in range(ranks):
            check_resumed(case, {
                name: torch.load(tmp_path / case / f"{name}.final.{rank}", weights_only=True)
                for name in ("straight", *MOMENTS)
            })  # fmt: skip
