"""Two ranks on two CUDA devices: turbo_ddp and its parts under NCCL, which takes device tensors alone."""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.ranks_worker import LEVELS, SETTINGS
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WORKER = Path(__file__).with_name("ranks_worker.py")


def test_ranks_agree_with_each_other_and_with_stock_ddp(tmp_path):
    root, given = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    run_ranks(
        WORKER, tmp_path, timeout=570, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"),
        PYTHONPATH=os.pathsep.join(filter(None, (given, root))),
    )  # fmt: skip
    for level in LEVELS:
        ends = {
            name: [torch.load(tmp_path / f"{name}.{level}.{rank}", weights_only=True) for rank in (0, 1)]
            for name in SETTINGS
        }
        for name, (first, second) in ends.items():
            for key, weight in first["weights"].items():
                assert weight.dtype is torch.float32
                assert torch.equal(weight, second["weights"][key]), (level, name, key)
            assert first["loss"] == second["loss"]
        # Float32: sums in another order. Otherwise half gradients in buckets of another cut, or rounded to be sent.
        limits = {"turbo": 1e-5 if level == "O0" else 1e-2, "bf16": 2e-2, "fp16": 1e-2}
        for name, limit in limits.items():
            for key, weight in ends[name][0]["weights"].items():
                torch.testing.assert_close(weight, ends["stock"][0]["weights"][key], rtol=limit, atol=limit)
    for rank in (0, 1):
        assert "bucket_cap_mb" in (tmp_path / f"refused.{rank}").read_text()
