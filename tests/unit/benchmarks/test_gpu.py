"""The suite for a GPU in its smallest form, on a CPU."""

import pytest
import torch

from benchmarks.gpu import TASKS
from benchmarks.suite import Meter, SkippedError, load_suite


def meter_of(steps):
    orders = iter([{"order": "round", "lead": 1, "steps": steps}])
    return Meter(lambda event: next(orders, {"order": "end"}), quick=True)


@pytest.mark.parametrize("task", ["transformer 12 x 768", pytest.param("3D UNet, 4 x 96^3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["PyTorch autocast bf16", "O2, bf16"])
def test_a_case_trains_in_its_smallest_form(task, name):
    case = load_suite("gpu").known[f"{task}: {name}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", False)  # the case changes it
        assert case.run(meter_of(steps=1), **case.config)["loss"] > 0


def test_what_needs_a_gpu_says_so():
    suite, task = load_suite("gpu"), next(iter(TASKS))
    graphed = "PyTorch autocast bf16, the whole step a graph"
    for name in ("PyTorch autocast fp16", graphed, "Lightning 16-mixed", "O2, fp16"):
        case = suite.known[f"{task}: {name}"]
        with pytest.raises(SkippedError, match="needs a GPU"):
            case.run(meter_of(steps=1), **case.config)


def test_rows_are_in_the_order_of_their_worth():
    suite = load_suite("gpu")
    assert suite.groups()[0] == [name for name in suite.known if name.startswith("ResNet-50, batch 128: ")]
    assert len(suite.groups()) == len(TASKS) + 1, "of the tasks, and feeds"
