"""What a background thread takes over from the thread that it works for, as far as CUDA goes; pretended here."""

import threading
from types import SimpleNamespace

import torch

from lightning_turbo.data import BackgroundIterator
from lightning_turbo.data.surroundings import Surroundings


def pretend(monkeypatch):
    """A device and a stream for each thread, as CUDA keeps them."""
    place = threading.local()
    default = SimpleNamespace(device=torch.device("cuda", 0))
    for name, value in {
        "is_initialized": lambda: True, "current_stream": lambda: getattr(place, "stream", default),
        "current_device": lambda: getattr(place, "device", default.device).index,
        "set_device": lambda device: setattr(place, "device", torch.device(device)),
        "set_stream": lambda stream: setattr(place, "stream", stream),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def here(_=None):
    return torch.cuda.current_device(), torch.cuda.current_stream()


def test_a_thread_works_on_the_stream_that_it_works_for(monkeypatch):
    pretend(monkeypatch)
    own = SimpleNamespace(device=torch.device("cuda", 1))
    torch.cuda.set_device(own.device)
    torch.cuda.set_stream(own)
    surroundings, seen = Surroundings(), []
    thread = threading.Thread(target=surroundings.run, args=(lambda: seen.append(here()),))
    thread.start()
    thread.join()
    assert seen == [(1, own)]


def test_a_loader_makes_its_batches_on_the_stream_of_the_loop(monkeypatch):
    pretend(monkeypatch)
    own = SimpleNamespace(device=torch.device("cuda", 0))
    torch.cuda.set_stream(own)
    threads = set()

    def made():
        for _ in range(8):
            threads.add(threading.current_thread())
            yield here()

    assert list(BackgroundIterator(made())) == [(0, own)] * 8
    assert len(threads) == 2  # the first item is made where it is asked for
