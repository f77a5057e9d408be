"""What is installed and what the machine has, without importing Lightning or waking a device; ok, or what to do."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lightning_turbo._optional import installed_version

__all__ = ["Environment", "Gpu", "Line", "as_json", "as_text", "check", "count_cores", "failed", "gather", "lines_for"]

MALICIOUS = ("2.6.2", "2.6.3")
ADVISORY = "GHSA-w37p-236h-pfx3"
LITTLE_SHARED_MEMORY = 2**30
"""Docker gives 64 MiB, which a few batches fill; 1 GiB is a choice, not a measurement."""

# DALI's distribution -> the oldest driver that runs it (NVIDIA, CUDA toolkit release notes).
_DALI_DRIVERS = {"nvidia-dali-cuda120": (525,), "nvidia-dali-cuda130": (580,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, as the driver describes it; ``memory`` in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What is installed and what the machine has; ``None`` means absent or unknown."""

    python: str
    torch: str
    torch_cuda: str | None = None  # the CUDA that torch was built with
    driver: str | None = None
    driver_cuda: tuple[int, ...] | None = None  # the newest CUDA that the driver can run
    gpus: tuple[Gpu, ...] = ()
    lightning: str | None = None
    pytorch_lightning: str | None = None
    apex: str = "absent"  # or "amp", "no amp", "stranger"
    dali: str | None = None  # the name of DALI's distribution
    dali_version: str | None = None
    prefetch_generator: str | None = None
    cores: int = 1
    omp_threads: str | None = None
    shared_memory: int | None = None  # bytes of /dev/shm


@dataclass(frozen=True, slots=True)
class Line:
    """What is said about one part, and what to do if it is not ok."""

    name: str
    status: str  # "ok", "note" or "fault"
    what: str
    remedy: str = ""


def check() -> list[Line]:
    """Look at this machine and say of each part whether it is ok, or what is wrong and what to do."""
    return lines_for(gather())


def failed(lines: Sequence[Line]) -> bool:
    """Return whether one of the lines reports a real fault."""
    return any(line.status == "fault" for line in lines)


def as_text(lines: Sequence[Line]) -> str:
    """Return the lines as text for the terminal."""
    width, marks = max(len(line.name) for line in lines), {"ok": "ok   ", "note": "note ", "fault": "FAULT"}
    rows = []
    for line in lines:
        rows.append(f"{marks[line.status]}  {line.name:{width}}  {line.what}")
        rows += [f"{'':7}{'':{width}}  -> {line.remedy}"] if line.remedy else []
    return "\n".join(rows)


def as_json(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Return the lines as plain dicts."""
    return [asdict(each) for each in lines]


def gather() -> Environment:
    """Collect the facts that ``check`` looks at.

    Note:
        Runs ``nvidia-smi`` if it exists; no CUDA context is made, and Lightning is not imported.
    """
    dali = next((name for name in reversed(_DALI_DRIVERS) if installed_version(name)), None)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        driver=driver[0] if driver else None,
        driver_cuda=_driver_cuda(),
        gpus=_gpus(),
        lightning=installed_version("lightning"),
        pytorch_lightning=installed_version("pytorch-lightning"),
        apex=_apex(),
        dali=dali,
        dali_version=installed_version(dali) if dali else None,
        prefetch_generator=installed_version("prefetch_generator"),
        cores=count_cores(),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    )


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lines_for(env: Environment) -> list[Line]:
    """Look at an environment, part by part."""
    checks = (_torch, _gpu, _driver, _lightning, _apex_line, _dali, _prefetch, _cores, _shared_memory)
    return [line for each in checks for line in each(env)]


def _version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, up to three: ``"2.6.0+cu124"`` gives ``(2, 6, 0)``."""
    found = re.match(r"\d+(\.\d+){0,2}", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _dotted(numbers: tuple[int, ...] | None) -> str:
    return ".".join(map(str, numbers)) if numbers else "unknown"


def _line(name: str, what: str, *problems: tuple[object, str, str]) -> Line:
    """A line that is ok unless one of the problems (condition, status, remedy) holds; the first one counts."""
    for holds, status, remedy in problems:
        if holds:
            return Line(name, status, what, remedy)
    return Line(name, "ok", what)


def _torch(env: Environment) -> Iterator[Line]:
    yield _line(
        "torch",
        f"{env.torch}, built for {'CUDA ' + env.torch_cuda if env.torch_cuda else 'the CPU'}, Python {env.python}",
        (
            _version(env.torch) < (2, 6),
            "fault",
            "lightning_turbo needs torch 2.6 or newer: pip install --upgrade torch",
        ),
        (
            env.gpus and not env.torch_cuda,
            "fault",
            "this machine has a GPU: install torch's CUDA build; see pytorch.org",
        ),
    )


def _gpu(env: Environment) -> Iterator[Line]:
    if not env.gpus:
        yield Line("GPU", "ok", "none found; everything runs on the CPU")
    for i, gpu in enumerate(env.gpus):
        cores = "with" if gpu.capability >= (7, 0) else "without"
        yield _line(
            f"GPU {i}",
            f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB, capability {_dotted(gpu.capability)}, {cores} tensor cores",
            (cores == "without", "note", "O1 to O3 save memory here, and hardly time"),
        )


def _driver(env: Environment) -> Iterator[Line]:
    has, needs = env.driver_cuda or (99, 0), _version(env.torch_cuda or "0.0")
    if env.gpus or env.driver_cuda:
        minor = "it runs (minor versions are compatible), but kernels that are compiled on the fly may not: update it"
        yield _line(
            "driver",
            f"driver {env.driver or 'unknown'} runs CUDA up to {_dotted(env.driver_cuda)}; torch has {env.torch_cuda}",
            (has[0] < needs[0], "fault", "update the driver, or install an older torch"),
            (has < needs, "note", minor),
        )


def _lightning(env: Environment) -> Iterator[Line]:
    found = {"lightning": env.lightning, "pytorch-lightning": env.pytorch_lightning}
    stolen = (
        f"a malicious upload ({ADVISORY}): pip uninstall lightning; treat every secret that this machine could reach "
    )
    for name, number in found.items():
        if number is not None:
            fits = (2, 5) <= _version(number) < (3,)
            remedy = f"lightning_turbo needs 2.5 or newer, below 3: pip install --upgrade {name}"
            malicious = name == "lightning" and number in MALICIOUS
            yield _line(
                name, number, (malicious, "fault", f"{stolen}as stolen and change it"), (not fits, "fault", remedy)
            )
    if not any(found.values()):
        yield Line("Lightning", "fault", "not installed", "pip install 'lightning>=2.5,!=2.6.2,!=2.6.3,<3'")


def _apex_line(env: Environment) -> Iterator[Line]:
    words = {
        "absent": "absent; ApexAMP has O0-O3 of its own",
        "amp": "NVIDIA's, with amp",
        "no amp": "NVIDIA's, without amp, which it dropped; ApexAMP has O0-O3 of its own",
        "stranger": "a package that is not NVIDIA's: PyPI's apex is an unrelated project",
    }
    remedy = "pip uninstall apex; ApexAMP needs none, and NVIDIA's is built from its repository"
    yield _line("apex", words[env.apex], (env.apex == "stranger", "fault", remedy))


def _dali(env: Environment) -> Iterator[Line]:
    if env.dali is None:
        what = "absent; only DALILoader and DALIDataModule need it: pip install 'lightning-turbo[dali]'"
        yield Line("DALI", "ok", what)
        return
    needed, has = _DALI_DRIVERS[env.dali], _version(env.driver or "") or (10_000,)
    remedy = (
        f"driver {env.driver} cannot run it: update to {_dotted(needed)} or newer, or install an older CUDA's build"
    )
    what = f"{env.dali} {env.dali_version}{'' if env.gpus else '; without a GPU, only its CPU operators run'}"
    yield _line("DALI", what, (env.gpus and has < needed, "fault", remedy))


def _prefetch(env: Environment) -> Iterator[Line]:
    found = env.prefetch_generator
    yield _line(
        "prefetch_generator", found or "absent", (not found, "fault", "pip install 'prefetch_generator>=1.0.3'")
    )


def _cores(env: Environment) -> Iterator[Line]:
    given = env.omp_threads or ""
    threads = int(given) if given.isdigit() else 0
    yield _line(
        "cores",
        f"{env.cores}, OMP_NUM_THREADS={given or 'not set'}",
        (given and not threads, "note", f"OMP_NUM_THREADS={given!r} is not a number of threads: unset it"),
        (threads > env.cores, "note", f"more threads than cores: export OMP_NUM_THREADS={env.cores}"),
        (threads == 1 and env.cores > 2 and not env.gpus, "note", "torch computes on one core: unset OMP_NUM_THREADS"),
    )


def _shared_memory(env: Environment) -> Iterator[Line]:
    size = env.shared_memory
    if size is not None:
        remedy = "loader workers pass batches through it and die when it is full: docker run --shm-size=8g"
        yield _line("/dev/shm", f"{size / 2**20:.0f} MiB", (size < LITTLE_SHARED_MEMORY, "note", remedy))


def _output(*command: str) -> str:
    """What a program prints, or an empty string if it is absent or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _gpus() -> tuple[Gpu, ...]:
    rows = _output("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")
    found = []
    for row in rows.splitlines():
        name, capability, memory = (part.strip() for part in row.rsplit(",", 2))
        numbers = _version(capability)
        if len(numbers) == 2 and memory.isdigit():
            found.append(Gpu(name=name, capability=(numbers[0], numbers[1]), memory=int(memory) * 2**20))
    return tuple(found)


def _driver_cuda() -> tuple[int, ...] | None:
    """The newest CUDA that the driver can run."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuDriverGetVersion(
            ctypes.byref(number)
        )
    except OSError:
        return None
    return (number.value // 1000, number.value % 1000 // 10) if status == 0 and number.value else None


def _apex() -> str:
    """``"absent"``, ``"amp"``, ``"no amp"``, or ``"stranger"`` for the unrelated project of that name on PyPI."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    if any((folder / "amp" / "__init__.py").exists() for folder in folders):
        return "amp"
    known = ("multi_tensor_apply", "normalization", "optimizers")
    return "no amp" if any((folder / name).is_dir() for folder in folders for name in known) else "stranger"
