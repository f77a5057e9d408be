"""Fixtures of all tests: seeds, a temporary working directory, and a check for leftovers."""

import functools
import gc
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_turbo.data.loading import prefetcher
from lightning_turbo.doctor import guard

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.set_num_threads(1)
WRAPPERS = ("fabric", "utilities", "data.py")  # where Lightning wraps the methods of loaders


def pytest_addoption(parser):
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds per test; without effect, because pytest-timeout is not installed")
    methods = multiprocessing.get_all_start_methods()
    parser.addoption("--start-method", choices=methods, help="default start method of worker processes")


def pytest_configure(config):
    config.addinivalue_line("markers", "timeout(seconds): limit of a test; requires pytest-timeout")
    if config.option.start_method:
        multiprocessing.set_start_method(config.option.start_method, force=True)
    # Worker processes that are forked from a server with these imports start in milliseconds.
    multiprocessing.set_forkserver_preload(["torch", "lightning.pytorch"])


def pytest_ignore_collect(collection_path, config):
    """With ``-m gpu``, do not import other tests, so that the tests for GPUs run with few packages."""
    others = collection_path.is_dir() and collection_path.parent == Path(__file__).parent
    return True if config.option.markexpr == "gpu" and others and collection_path.name != "gpu" else None


def pytest_collection_modifyitems(config, items):
    def has_apex_amp():
        try:
            import apex.amp

            return hasattr(apex.amp, "initialize")
        except ImportError:
            return False

    cuda = torch.cuda.is_available()
    apex = has_apex_amp()
    for item in items:
        if item.get_closest_marker("gpu") and not cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("apex") and not apex:
            item.add_marker(pytest.mark.skip(reason="needs NVIDIA apex with apex.amp"))


def pytest_collection_finish():
    """Keep entry points, and exclude imported objects from garbage collection, which tests run often."""
    for name in ("lightning.fabric.utilities.registry", "lightning_fabric.utilities.registry"):
        if name in sys.modules:
            keep_entry_points(sys.modules[name])
    gc.collect()
    gc.freeze()


def keep_entry_points(registry):
    """Read the metadata of packages once. Each new Trainer reads it, which is a third of a short run."""
    read = registry.entry_points
    kept = functools.cache(lambda path, **selected: read(**selected))
    # The Doctor adds a folder with metadata to the path, for the script that it runs.
    registry.entry_points = lambda **selected: kept(tuple(sys.path), **selected)


def pytest_sessionfinish(session, exitstatus):
    """Fail a run of the GPU or apex tests in which no test ran."""
    asked = session.config.option.markexpr
    ran = session.testscollected and not session.testsfailed and not session.config.option.collectonly
    if asked in ("gpu", "apex") and ran:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if not reporter.stats.get("passed"):
            session.exitstatus = 1


@pytest.fixture
def free_alarm():
    """Free SIGALRM, with which pytest-timeout ends a test, for the Doctor's samples; give it back afterwards."""
    left = signal.setitimer(signal.ITIMER_REAL, 0.0)
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *left)


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """Seed all generators, use a temporary working directory, and raise internal errors of the Doctor."""
    monkeypatch.setattr(guard, "RAISES", True)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def every_loader_has_a_thread(monkeypatch):
    """Start a thread in every prefetching loader at its third batch, even if loading is fast."""
    monkeypatch.setattr(prefetcher, "MIN_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _drop_compiled():
    """Reset torch's compiler after a test, because the Doctor does not watch processes with compiled code."""
    yield
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is not None and compiler.input_codes.seen:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    """Fail a test that leaves threads, process groups, or changed global settings of torch."""
    before = _globals()
    threads = set(threading.enumerate())
    yield
    after = _globals()
    _put_back_loaders()
    # Lightning, scikit-learn, blosc2 and older versions of torch set these on first use.
    lasting = (
        "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "KINETO_LOG_LEVEL", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
        "ME_DSL_JIT_LIBTCC_PATH", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "POSSIBLE_USER_WARNINGS",
        "PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR",
    )  # fmt: skip
    for left in lasting:
        before["environment"].pop(left, None)
        after["environment"].pop(left, None)
    # Report only the names of variables that differ, because values may be private.
    variables = before.pop("environment"), after.pop("environment")
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    differing = {name for name, _ in set(variables[0].items()) ^ set(variables[1].items())}
    if differing:
        changed["environment"] = sorted(differing)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        changed["process group"] = ("none", "initialized")
    deadline = time.monotonic() + 5
    while extra := [t for t in threading.enumerate() if t not in threads and t.is_alive() and not _lasting(t)]:
        if time.monotonic() > deadline:
            changed["threads"] = (len(threads), extra)
            break
        time.sleep(0.01)
    assert not changed, f"the test left changed: {changed}"


def _put_back_loaders():
    """Remove Lightning's wrappers of loader methods, which stay if a ``*_dataloader`` method raised an error."""
    kinds = [DataLoader, BatchSampler]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        for name in ("__init__", "__setattr__", "__delattr__"):
            method = vars(kind).get(name)
            while Path(getattr(getattr(method, "__code__", None), "co_filename", "")).parts[-3:] == WRAPPERS:
                method = method.__wrapped__
                setattr(kind, name, method)
            if f"__old{name}" in vars(kind):
                delattr(kind, f"__old{name}")


def _lasting(thread):
    """Return whether a library keeps this thread until the process ends."""
    started = ("tensorboard", "tqdm_monitor", "pydevd", "ThreadPoolExecutor-pynvml")
    return thread.name.startswith(started) or "(_read_thread)" in thread.name  # torch 2.6's compiler


def _globals():
    """Return the global settings that a test must restore."""
    return {
        "environment": dict(os.environ),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "function modes": torch._C._len_torch_function_stack(),
    }
