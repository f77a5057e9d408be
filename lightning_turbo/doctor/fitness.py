"""Pure judgement: facts about a machine -> lines that say ok, or what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.machine import Environment, Line, version

__all__ = ["lines_for"]

MALICIOUS = ("2.6.2", "2.6.3")
ADVISORY = "GHSA-w37p-236h-pfx3"
OLDEST = {"torch": (2, 6), "lightning": (2, 5)}
LITTLE_SHARED_MEMORY = 2**30
"""Docker gives 64 MiB, which a few batches fill; 1 GiB is a choice, not a measurement."""

# DALI's distribution -> the oldest driver that runs it (NVIDIA, CUDA toolkit release notes).
_DALI_DRIVERS = {"nvidia-dali-cuda120": (525,), "nvidia-dali-cuda130": (580,)}


def lines_for(env: Environment) -> list[Line]:
    """Judge an environment, part by part."""
    return [
        line
        for judge in (
            _torch,
            _gpus,
            _driver,
            _nvcc,
            _cudnn,
            _lightning,
            _apex,
            _dali,
            _packages,
            _cores,
            _shared_memory,
            _nccl,
        )
        for line in judge(env)
    ]


def _ok(name: str, what: str) -> Line:
    return Line(name=name, status="ok", what=what)


def _note(name: str, what: str, mend: str) -> Line:
    return Line(name=name, status="note", what=what, mend=mend)


def _fault(name: str, what: str, mend: str) -> Line:
    return Line(name=name, status="fault", what=what, mend=mend)


def _dotted(numbers: tuple[int, ...] | None) -> str:
    return ".".join(map(str, numbers)) if numbers else "unknown"


def _torch(env: Environment) -> Iterator[Line]:
    built = f"{env.torch}, built for {'CUDA ' + env.torch_cuda if env.torch_cuda else 'the CPU'}, Python {env.python}"
    if version(env.torch) < OLDEST["torch"]:
        yield _fault("torch", built, "lightning_turbo needs torch 2.6 or newer: pip install --upgrade torch")
    elif env.gpus and env.torch_cuda is None:
        yield _fault("torch", f"{built}, on a machine with a GPU", "install the CUDA build of torch; see pytorch.org")
    else:
        yield _ok("torch", built)


def _gpus(env: Environment) -> Iterator[Line]:
    if not env.gpus:
        yield _ok("GPU", "none found; everything runs on the CPU")
    for i, gpu in enumerate(env.gpus):
        cores = "with tensor cores" if gpu.capability >= (7, 0) else "without tensor cores"
        what = f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB, capability {_dotted(gpu.capability)}, {cores}"
        name = f"GPU {i}"
        if env.torch_architectures and not _built_for(env.torch_architectures, gpu.capability):
            built = ", ".join(env.torch_architectures)
            yield _fault(name, f"{what}; torch was built for {built}", "install a torch that was built for this GPU")
        elif gpu.capability < (7, 0):
            yield _note(name, what, "O1 to O3 save memory here, and hardly time")
        else:
            yield _ok(name, what)


def _built_for(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether some kernel runs: one of the same major version, or PTX of an older one."""
    for each in architectures:
        kind, _, number = each.partition("_")
        digits = "".join(ch for ch in number if ch.isdigit())
        if len(digits) >= 2:
            built = (int(digits[:-1]), int(digits[-1]))
            if built <= capability and (kind == "compute" or built[0] == capability[0]):
                return True
    return False


def _driver(env: Environment) -> Iterator[Line]:
    if not env.gpus and env.driver_cuda is None:
        return
    what = f"driver {env.driver or 'unknown'} runs CUDA up to {_dotted(env.driver_cuda)}"
    if env.torch_cuda is None or env.driver_cuda is None:
        yield _ok("driver", what)
    elif env.driver_cuda[0] < version(env.torch_cuda)[0]:
        yield _fault("driver", f"{what}; torch needs {env.torch_cuda}", "update the driver, or install an older torch")
    elif env.driver_cuda < version(env.torch_cuda):
        mend = "it runs (minor versions are compatible), but kernels that are compiled on the fly may not: update it"
        yield _note("driver", f"{what}; torch has {env.torch_cuda}", mend)
    else:
        yield _ok("driver", what)


def _nvcc(env: Environment) -> Iterator[Line]:
    if env.nvcc is None:
        if env.gpus:
            yield _ok("nvcc", "absent; needed only to compile extensions such as NVIDIA's apex")
    elif env.torch_cuda and version(env.nvcc)[:1] != version(env.torch_cuda)[:1]:
        mend = f"to compile extensions, use the toolkit of CUDA {env.torch_cuda}"
        yield _note("nvcc", f"{env.nvcc}, while torch was built with CUDA {env.torch_cuda}", mend)
    else:
        yield _ok("nvcc", env.nvcc)


def _cudnn(env: Environment) -> Iterator[Line]:
    if env.torch_cuda is None:
        return
    if env.cudnn is None:
        yield _fault("cuDNN", "torch cannot find it", "reinstall torch, which brings its own cuDNN")
    else:
        yield _ok("cuDNN", str(env.cudnn))


def _lightning(env: Environment) -> Iterator[Line]:
    if env.lightning is None and env.pytorch_lightning is None:
        yield _fault("Lightning", "not installed", "pip install 'lightning>=2.5,!=2.6.2,!=2.6.3,<3'")
    for name, found in (("lightning", env.lightning), ("pytorch-lightning", env.pytorch_lightning)):
        if found is None:
            continue
        if name == "lightning" and found in MALICIOUS:
            what = f"{found} was a malicious upload ({ADVISORY})"
            mend = "pip uninstall lightning; treat every secret this machine could reach as stolen and change it"
            yield _fault(name, what, mend)
        elif not OLDEST["lightning"] <= version(found) < (3,):
            yield _fault(name, found, f"lightning_turbo needs 2.5 or newer, below 3: pip install --upgrade {name}")
        else:
            yield _ok(name, found)


def _apex(env: Environment) -> Iterator[Line]:
    if env.apex == "stranger":
        what = "a package named apex that is not NVIDIA's: PyPI's apex is an unrelated project"
        yield _fault("apex", what, "pip uninstall apex; ApexAMP needs none, and NVIDIA's is built from its repository")
    elif env.apex == "no amp":
        yield _ok("apex", "NVIDIA's, without amp, which it dropped in 2025; ApexAMP has O0-O3 of its own")
    elif env.apex == "amp":
        yield _ok("apex", "NVIDIA's, with amp")
    else:
        yield _ok("apex", "absent; ApexAMP has O0-O3 of its own")


def _dali(env: Environment) -> Iterator[Line]:
    if env.dali is None:
        yield _ok("DALI", "absent; only DALILoader and DALIDataModule need it: pip install 'lightning-turbo[dali]'")
        return
    what = f"{env.dali} {env.dali_version}"
    needed = _DALI_DRIVERS.get(env.dali)
    if env.gpus and env.driver and needed and version(env.driver) < needed:
        mend = f"update the driver to {_dotted(needed)} or newer, or install the build for an older CUDA"
        yield _fault("DALI", f"{what}, which driver {env.driver} cannot run", mend)
    elif not env.gpus:
        yield _ok("DALI", f"{what}; without a GPU, only its CPU operators run")
    else:
        yield _ok("DALI", what)


def _packages(env: Environment) -> Iterator[Line]:
    if env.prefetch_generator is None:
        yield _fault("prefetch_generator", "not installed", "pip install 'prefetch_generator>=1.0.3'")
    else:
        yield _ok("prefetch_generator", env.prefetch_generator)
    yield _ok("torchdata", env.torchdata or "absent; nothing needs it")


def _cores(env: Environment) -> Iterator[Line]:
    what = f"{env.cores}, OMP_NUM_THREADS={env.omp_threads or 'not set'}"
    threads = int(env.omp_threads) if env.omp_threads and env.omp_threads.isdigit() else None
    if env.omp_threads and threads is None:
        yield _note("cores", what, f"OMP_NUM_THREADS={env.omp_threads!r} is no whole number: unset it")
    elif threads is not None and threads > env.cores:
        yield _note("cores", what, f"more threads than cores: export OMP_NUM_THREADS={env.cores}")
    elif threads == 1 and env.cores > 2 and not env.gpus:
        yield _note("cores", what, "torch computes on one core: unset OMP_NUM_THREADS, or raise it")
    else:
        yield _ok("cores", what)


def _shared_memory(env: Environment) -> Iterator[Line]:
    if env.shared_memory is None:
        return
    what = f"{env.shared_memory / 2**20:.0f} MiB"
    if env.shared_memory < LITTLE_SHARED_MEMORY:
        mend = "loader workers pass batches through it and die when it is full: docker run --shm-size=8g"
        yield _note("/dev/shm", what, mend)
    else:
        yield _ok("/dev/shm", what)


def _nccl(env: Environment) -> Iterator[Line]:
    if env.nccl is not None:
        yield _ok("NCCL", env.nccl)
    elif len(env.gpus) > 1:
        yield _fault(
            "NCCL", f"absent, with {len(env.gpus)} GPUs", "install a torch with NCCL; gloo is many times slower"
        )
