"""The judgement on a machine: each part ok, noted or faulty, with the way to mend it."""

from dataclasses import replace

import pytest

from lightning_turbo.doctor.fitness import lines_for
from lightning_turbo.doctor.machine import Environment, Gpu, version

A100 = Gpu(name="A100", capability=(8, 0), memory=80 * 2**30)
GOOD = Environment(
    python="3.12.1",
    torch="2.6.0+cu124",
    torch_cuda="12.4",
    torch_architectures=("sm_80", "sm_90"),
    cudnn=90100,
    nccl="2.21.5",
    driver="550.54",
    driver_cuda=(12, 4),
    nvcc="12.4",
    gpus=(A100, A100),
    lightning="2.6.6",
    prefetch_generator="1.0.3",
    cores=8,
    shared_memory=8 * 2**30,
)

CASES = [
    ("torch", {"torch": "2.5.1"}, "fault", "2.6 or newer"),
    ("torch", {"torch_cuda": None, "torch_architectures": ()}, "fault", "CUDA build"),
    ("GPU 0", {"torch_architectures": ("sm_90",)}, "fault", "built for this GPU"),
    ("GPU 0", {"torch_architectures": ("compute_70",)}, "ok", ""),
    ("GPU 0", {"gpus": (replace(A100, capability=(6, 1)),), "torch_architectures": ("sm_60",)}, "note", "save memory"),
    ("driver", {"driver_cuda": (11, 8)}, "fault", "update the driver"),
    ("driver", {"driver_cuda": (12, 2)}, "note", "compatible"),
    ("driver", {"driver_cuda": (13, 0)}, "ok", ""),
    ("nvcc", {"nvcc": "11.8"}, "note", "toolkit of CUDA 12.4"),
    ("nvcc", {"nvcc": "12.1"}, "ok", ""),
    ("nvcc", {"nvcc": None}, "ok", ""),
    ("cuDNN", {"cudnn": None}, "fault", "reinstall torch"),
    ("lightning", {"lightning": "2.6.2"}, "fault", "change it"),
    ("lightning", {"lightning": "2.6.3"}, "fault", "change it"),
    ("lightning", {"lightning": "1.9.5"}, "fault", "2.5 or newer"),
    ("lightning", {"lightning": "3.0.0"}, "fault", "below 3"),
    ("pytorch-lightning", {"pytorch_lightning": "2.5.0"}, "ok", ""),
    ("Lightning", {"lightning": None}, "fault", "pip install"),
    ("apex", {"apex": "absent"}, "ok", ""),
    ("apex", {"apex": "amp"}, "ok", ""),
    ("apex", {"apex": "no amp"}, "ok", ""),
    ("apex", {"apex": "stranger"}, "fault", "pip uninstall apex"),
    ("DALI", {}, "ok", ""),
    ("DALI", {"dali": "nvidia-dali-cuda120", "dali_version": "2.4.0"}, "ok", ""),
    ("DALI", {"dali": "nvidia-dali-cuda130", "dali_version": "2.4.0"}, "fault", "580"),
    ("DALI", {"dali": "nvidia-dali-cuda130", "dali_version": "2.4.0", "gpus": ()}, "ok", ""),
    ("prefetch_generator", {"prefetch_generator": None}, "fault", "pip install"),
    ("torchdata", {"torchdata": None}, "ok", ""),
    ("cores", {"omp_threads": "8"}, "ok", ""),
    ("cores", {"omp_threads": "9"}, "note", "OMP_NUM_THREADS=8"),
    ("cores", {"omp_threads": "many"}, "note", "unset it"),
    ("cores", {"omp_threads": "1", "gpus": ()}, "note", "one core"),
    ("/dev/shm", {"shared_memory": 64 * 2**20}, "note", "--shm-size"),
    ("NCCL", {"nccl": None}, "fault", "install a torch with NCCL"),
]


def line(name, env):
    return next(each for each in lines_for(env) if each.name == name)


def test_a_good_machine_is_all_ok():
    assert {each.status for each in lines_for(GOOD)} == {"ok"}


def test_a_machine_without_a_gpu_is_ok():
    bare = Environment(python="3.10.1", torch="2.6.0", lightning="2.5.0", prefetch_generator="1.0.3")
    assert {each.status for each in lines_for(bare)} == {"ok"}


@pytest.mark.parametrize(("name", "changes", "status", "mend"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_part_is_judged(name, changes, status, mend):
    found = line(name, replace(GOOD, **changes))
    assert found.status == status, found
    assert mend in found.mend
    assert bool(found.mend) == (status != "ok")


def test_one_gpu_needs_no_nccl():
    names = {each.name for each in lines_for(replace(GOOD, gpus=(A100,), nccl=None))}
    assert "NCCL" not in names


def test_versions_are_read():
    assert version("2.6.0+cu124") == (2, 6, 0)
    assert version("550.54.15") == (550, 54, 15)
    assert version("git") == ()
