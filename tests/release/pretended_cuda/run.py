"""Run the tests for CUDA, or any other command, on simulated devices: on a CPU, with a torch built without CUDA.

    python tests/release/pretended_cuda/run.py [--devices N] [--folder DIR] [PYTEST ARGUMENTS]
    python tests/release/pretended_cuda/run.py [--devices N] [--folder DIR] --module examples.demo --device cuda

A simulated device uses the host's memory and the CPU's kernels. It detects tensors on the wrong device, synchronization
with the host, allocated bytes, and host tensors in NCCL calls. Operations run immediately, but a stream that uses
memory which another stream still uses, without synchronization or ``record_stream``, raises an error, and a copy to
pinned memory is complete only after the host has synchronized. Speed, NCCL's streams, and DALI on a GPU are not
simulated.

Arguments for pytest are added to those that select the tests; a path replaces tests/gpu. Requires a C++ compiler and
ninja, and the torch version of constraints.txt.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# Tests that require a real device.
REAL = (
    "tests/gpu/test_dali.py",
    "tests/gpu/test_device_prefetch.py::test_throughput_is_that_of_data_on_the_device",
    "tests/gpu/test_doctor.py::test_the_time_line_is_the_devices",
)


def build(folder):
    """Compile the sources unless they are unchanged, and return the library."""
    from torch.utils.cpp_extension import load

    folder.mkdir(parents=True, exist_ok=True)
    print(f"building {folder / 'pretended_cuda.so'} ...", flush=True)
    sources = [str(HERE / name) for name in ("device.cpp", "kernels.cpp", "streams.cpp")]
    load(
        "pretended_cuda", sources, extra_cflags=["-O1"], build_directory=str(folder), is_python_module=False,
    )  # fmt: skip
    return folder / "pretended_cuda.so"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=2, help="how many, 1 or more (default 2)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "pretended_cuda", help="for what is built")
    parser.add_argument("--module", action="store_true", help="run the module that is named next, not pytest")
    asked, words = parser.parse_known_args()
    if asked.devices < 1:
        parser.error(f"--devices {asked.devices}: 1 or more")
    environment = {
        **os.environ,
        "PRETENDED_CUDA": str(asked.devices),
        "PRETENDED_CUDA_LIBRARY": str(build(asked.folder.resolve())),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    if not asked.module:
        named = any((ROOT / word.partition("::")[0]).exists() for word in words)
        chosen = ["-m", "gpu", *(word for each in REAL for word in ("--deselect", each))]
        words = ["pytest", *chosen, *words, *([] if named else ["tests/gpu"])]
    return subprocess.run(
        [sys.executable, "-m", *words], env=environment, cwd=None if asked.module else ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
