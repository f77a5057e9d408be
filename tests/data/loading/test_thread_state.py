"""What belongs to one thread: modes that the background thread takes over, and the note where it cannot."""

import contextvars
import threading
import types

import pytest
import torch

from lightning_turbo.data.loading.thread_state import ThreadState
from tests.data.loading.iterators import for_a_thread

variable = contextvars.ContextVar("variable", default="none")


def modes():
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"), torch.empty(0).device, variable.get(),
    )  # fmt: skip


CONTEXTS = [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.float16),
    lambda: torch.device("meta"),
]  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_callers_modes_reach_the_thread(context):
    variable.set("mine")
    with context():
        here = modes()
        got = list(for_a_thread(modes() for _ in range(6)))
    assert got == [here] * 6
    assert here != modes()


def test_a_thread_works_on_the_cuda_device_and_stream_that_it_works_for(monkeypatch):
    """A device and a stream for each thread, as CUDA keeps them, are pretended here."""
    place = threading.local()
    default = types.SimpleNamespace(device=torch.device("cuda", 0))
    for name, value in {
        "is_initialized": lambda: True, "current_stream": lambda: getattr(place, "stream", default),
        "set_device": lambda device: setattr(place, "device", torch.device(device)),
        "set_stream": lambda stream: setattr(place, "stream", stream),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    own = types.SimpleNamespace(device=torch.device("cuda", 1))
    torch.cuda.set_stream(own)
    state, seen = ThreadState(), []
    thread = threading.Thread(target=lambda: seen.extend((state.enter(), place.device, place.stream)))
    thread.start()
    thread.join()
    assert seen == [None, own.device, own]
