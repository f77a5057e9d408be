"""Load the library of simulated devices in a torch built without CUDA, and replace the functions of ``torch.cuda``.

``PRETENDED_CUDA`` is the number of devices, ``PRETENDED_CUDA_LIBRARY`` the library that ``run.py`` builds. Import this
module before torch, because torch reads the device hooks on its first use.
"""

import contextlib
import ctypes
import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

assert "torch" not in sys.modules, "torch is imported already"
_lib = Path(importlib.util.find_spec("torch").origin).parent / "lib"
for _name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
    ctypes.CDLL(str(_lib / _name), ctypes.RTLD_GLOBAL)
_library = os.environ["PRETENDED_CUDA_LIBRARY"]
ctypes.CDLL(_library, ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch._dynamo  # noqa: E402

_spec = importlib.util.spec_from_file_location("pretended_cuda", _library)
device = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(device)
_warned = []  # whether torch's warning was given, which it gives once
_MODES = {"default": 0, "warn": 1, "error": 2}
_MEMORY = 80 << 30  # bytes per device
_PROPERTIES = SimpleNamespace(
    name="pretended",
    major=8,
    minor=0,
    total_memory=_MEMORY,
    multi_processor_count=108,
    is_integrated=False,
    warp_size=32,
)


def index_of(where):
    """Return the index of a device, -1 for the current one."""
    if where is None or isinstance(where, int):
        return -1 if where is None else where
    found = torch.device(where).index
    return -1 if found is None else found


class Stream(torch.Stream):
    def __new__(cls, where=None, priority=0, **known):
        if known:
            return super().__new__(cls, **known)
        index = index_of(where)
        index = device.current_device() if index < 0 else index
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, device="cuda")

    def record(self, stream=None):
        self.at = time.perf_counter()
        super().record(stream or current_stream())

    def wait(self, stream=None):
        super().wait(stream or current_stream())

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


def current_stream(where=None):
    index = index_of(where)
    index = device.current_device() if index < 0 else index
    return Stream(stream_id=device.on_stream(-1), device_index=index, device_type=1)


def default_stream(where=None):
    return Stream(stream_id=0, device_index=current_stream(where).device_index, device_type=1)


def set_stream(stream):
    device.on_stream(stream.stream_id)


@contextlib.contextmanager
def stream_context(stream):
    before = current_stream()
    set_stream(stream or before)
    try:
        yield
    finally:
        set_stream(before)


class DeviceContext:
    def __init__(self, where):
        self.index = index_of(where)

    def __enter__(self):
        self.before = device.exchange(self.index)

    def __exit__(self, *_):
        device.exchange(self.before)


def nothing(*_, **__):
    pass


def set_sync_debug_mode(mode):
    # As in torch, the mode is also set if the warning of the first call is an error.
    device.set_sync_mode(_MODES.get(mode, mode))
    if not _warned:
        _warned.append(mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=2,
        )


def clone_storage(self):
    if self.device.type != "cuda":
        return _clone(self)
    twin = torch.empty(self.nbytes(), dtype=torch.uint8, device=self.device)
    twin.copy_(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self))
    return twin.untyped_storage()


def move_storage(self, *, device, non_blocking=False):
    if torch.device(device).type != "cuda" or self.device.type == "cuda":
        return _to(self, device=device, non_blocking=non_blocking)
    return torch.empty(0, dtype=torch.uint8).set_(self).to(device).untyped_storage()


_clone, _to = torch.UntypedStorage.clone, torch.UntypedStorage.to


def install():
    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # it needs the original functions of torch.cuda
    torch.version.cuda = "12.8"
    torch.UntypedStorage.clone, torch.UntypedStorage.to = clone_storage, move_storage
    given = {
        "_exchange_device": device.exchange, "_initialized": True, "_is_in_bad_fork": lambda: False,
        "_lazy_init": nothing, "_maybe_exchange_device": device.exchange, "Event": Event, "Stream": Stream,
        "current_device": device.current_device,
        "current_stream": current_stream, "default_generators": (device.generator(),) * device.count(),
        "default_stream": default_stream, "device": DeviceContext, "device_count": device.count,
        "empty_cache": lambda: device.empty_cache(), "get_arch_list": lambda: ["sm_80"],
        "get_device_capability": lambda where=None: (8, 0), "get_device_name": lambda where=None: _PROPERTIES.name,
        "get_device_properties": lambda where=None: _PROPERTIES, "get_sync_debug_mode": device.sync_mode,
        "init": nothing, "ipc_collect": nothing, "is_available": lambda: device.count() > 0,
        "is_bf16_supported": lambda including_emulation=True: True, "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True, "max_memory_allocated": lambda where=None: device.peak(),
        "max_memory_reserved": lambda where=None: device.reserved(),
        "mem_get_info": lambda where=None: (_MEMORY - device.allocated(), _MEMORY),
        "memory_allocated": lambda where=None: device.allocated(),
        "memory_reserved": lambda where=None: device.reserved(),
        "memory_stats": lambda where=None: {"num_alloc_retries": 0, "num_ooms": 0},
        "reset_peak_memory_stats": lambda where=None: device.reset_peak(),
        "set_device": lambda where: device.exchange(index_of(where)), "set_stream": set_stream,
        "set_sync_debug_mode": set_sync_debug_mode, "stream": stream_context,
        "synchronize": lambda where=None: device.synchronize(), "utilization": lambda where=None: 0,
    }  # fmt: skip
    for name, value in given.items():
        setattr(torch.cuda, name, value)
    random = torch.cuda.random
    random._lazy_call, random._lazy_init = lambda call, **_: call(), nothing
    random.current_device, random.device_count = device.current_device, device.count


install()
if device.count() > 1:
    import pretended_nccl  # noqa: F401
