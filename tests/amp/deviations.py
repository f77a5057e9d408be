"""Prints the deviations of this library from the recorded runs of apex: ``python -m tests.amp.deviations``."""

import numpy as np
import torch

from lightning_turbo import amp
from tests.amp.naive_loop import PLAIN
from tests.amp.recorded import CASES, run_case
from tests.amp.test_recorded_runs import BEFORE_NORM, BITWISE, deviation, finite, same_bits, together


def equal_to_torch_alone():
    """Return how many float32 runs on this machine equal those of plain torch, bit for bit."""
    equal, cases = 0, [row for row in CASES.values() if row["opt_level"] == "O0"]
    for row in cases:
        arrays, ours = run_case(row, amp)
        amp.shutdown()
        _, plain = run_case(row, PLAIN)
        names = [name for name in arrays if name.split("/")[0] in BITWISE]
        equal += all(torch.equal(torch.as_tensor(ours[n]), torch.as_tensor(plain[n])) for n in names)
    return equal, len(cases)


def largest(level):
    """Return the numbers of cases and of bitwise equal cases of a level, and the largest deviations of the others."""
    equal, loss, weights, cases = 0, 0.0, 0.0, [row for row in CASES.values() if row["opt_level"] == level]
    for row in cases:
        arrays, ours = run_case(row, amp)
        amp.shutdown()
        loss = max(loss, deviation("loss_rel", row, arrays, ours))
        same = all(same_bits(ours[n], arrays[n]) for n in arrays if n.split("/")[0] in BITWISE)
        equal += same and np.array_equal(ours["loss"].ravel(), arrays["loss"].ravel(), equal_nan=True)
        _, join = together(arrays, "master", BEFORE_NORM.get(row["model"], ()))
        mine, theirs = finite(join(ours), join(arrays))
        if theirs.size:
            weights = max(weights, np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
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
