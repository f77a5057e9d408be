"""Prints how far the recorded runs of apex are from this library's: ``python -m tests.unit.amp.deviations``."""

import numpy as np
import torch

from lightning_turbo import amp
from tests.unit.amp.naive_loop import PLAIN
from tests.unit.amp.recorded import CASES, run_case
from tests.unit.amp.test_recorded_runs import as_stored

ARRAYS = ("out0", "grad0", "p1", "final_stored", "final_buf", "master", "eval_out")

# A bias in front of batch norm has no exact gradient; Adam turns its rounding noise into whole steps.
BEFORE_NORM = {"convbn": ("master/3.bias",), "conv3d": ("master/0.bias",)}


def equal_to_torch_alone():
    """How many float32 runs are, on this machine, equal to those of torch without this library in every bit."""
    equal, cases = 0, [row for row in CASES.values() if row["opt_level"] == "O0"]
    for row in cases:
        arrays, ours = run_case(row, amp)
        amp.shutdown()
        _, plain = run_case(row, PLAIN)
        names = [name for name in arrays if name.split("/")[0] in ARRAYS]
        equal += all(torch.equal(torch.as_tensor(ours[n]), torch.as_tensor(plain[n])) for n in names)
    return equal, len(cases)


def largest(level):
    """Cases of a level, how many are equal in every bit, and the largest relative deviations of the others."""
    equal, loss, weights, cases = 0, 0.0, 0.0, [row for row in CASES.values() if row["opt_level"] == level]
    for row in cases:
        arrays, ours = run_case(row, amp)
        amp.shutdown()
        theirs, mine = arrays["loss"].ravel(), ours["loss"].ravel()
        finite = np.isfinite(theirs)
        loss = max(loss, np.max(np.abs(mine - theirs)[finite] / np.abs(theirs[finite]), initial=0.0))
        names = [name for name in arrays if name.split("/")[0] in ARRAYS]
        same = all(np.array_equal(as_stored(ours[n], arrays[n]), arrays[n], equal_nan=True) for n in names)
        equal += same and np.array_equal(mine, theirs, equal_nan=True)
        masters = [n for n in arrays if n.startswith("master/") and n not in BEFORE_NORM.get(row["model"], ())]
        both = [np.concatenate([np.asarray(s[n], np.float64).ravel() for n in masters]) for s in (ours, arrays)]
        kept = np.isfinite(both[1])
        if kept.any():
            weights = max(weights, np.linalg.norm((both[0] - both[1])[kept]) / np.linalg.norm(both[1][kept]))
    return len(cases), equal, loss, weights


def main():
    torch.set_num_threads(1)
    print("| Level | Recorded runs | Equal in every bit | Largest deviation of a loss | of the final weights |")
    print("|---|---|---|---|---|")
    for level in ("O0", "O1", "O2", "O3"):
        cases, equal, loss, weights = largest(level)
        print(f"| {level} | {cases} | {equal} | {loss:.1e} | {weights:.1e} |")
    print("\nO0 against torch alone on this machine: {} of {} runs equal in every bit.".format(*equal_to_torch_alone()))


if __name__ == "__main__":
    main()
