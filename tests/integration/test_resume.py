"""N steps straight equal k steps, a checkpoint, a new Trainer and N - k steps: zero differing bits."""

import pytest

from tests.integration.resuming import ALL, check_resumed, run_all

QUICK = ["O0-sgd-bfloat16", "O1-adamw_fused-float16", "O2-adam-bfloat16", "O2-sgd-float16", "O3-adamw-bfloat16"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ALL]
)
def test_another_trainer_resumes_bit_for_bit(case, tmp_path):
    check_resumed(case, run_all(case, tmp_path))
