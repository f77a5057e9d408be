"""Repeats recorded runs and writes the results to a file: ``python -m tests.amp.recorded_worker FILE CASE ...``.

This needs a separate process, because oneDNN selects its kernels when torch starts. On CPUs with float16 instructions
it selects other kernels than those of the recording, which round differently.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

ISA = "ONEDNN_MAX_CPU_ISA"
BELOW_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
PLAIN_CASES = ("base_mlp_sgd_O0", "base_convbn_adam_O0", "base_conv3d_sgd_O0")


def run_apart(file, cases):
    """Run this module in a process that uses the same kernels as the recording, and return the results of the cases."""
    environment = dict(os.environ)
    if environment.get(ISA) not in BELOW_AVX512:
        environment[ISA] = "AVX512_CORE"
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-m", "tests.amp.recorded_worker", str(file), *cases]
    subprocess.run(command, check=True, env=environment, cwd=root, timeout=300)
    with open(file, "rb") as handle:
        return pickle.load(handle)


def main(file, *cases):
    import torch

    from lightning_turbo import amp
    from tests.amp.naive_loop import PLAIN, naive
    from tests.amp.recorded import CASES, run_case

    torch.set_num_threads(1)
    results = {"plain": {case: run_case(CASES[case], PLAIN)[1] for case in PLAIN_CASES}, "ours": {}, "naive": {}}
    for case in cases:
        row = CASES[case]
        results["ours"][case] = run_case(row, amp)[1]
        amp.shutdown()
        if row["opt_level"] in ("O2", "O3") and not row["clip_max_norm"]:
            results["naive"][case] = naive(row)
    with open(file, "wb") as handle:
        pickle.dump(results, handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
