"""``python -m benchmarks stops``: which loaders return each sample once and in order if they are stopped several times.

``lightning_turbo.testing.report_resume`` stops each loader, builds a new one, and compares the samples with those of a
run without stops. Each row runs in its own process. Libraries that are not installed are left out.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_turbo.measure import print_lines

__all__ = ["PEERS", "main"]

SAMPLES, BATCH, EPOCHS, SHARDS = 240, 4, 2, 4
SECONDS = 240  # time limit of a row


class Peer(NamedTuple):
    """A loader of the table.

    Attributes:
        make: Called with the number of worker processes and a folder for its files; returns a new loader.
        package: Distribution that must be installed.
    """

    make: Callable[[int, Path], Any]
    package: str


class Rows(torch.utils.data.Dataset[int]):
    """The numbers from 0 to ``SAMPLES - 1``."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same numbers as a stream with state, divided among worker processes."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        number, step = (info.id, info.num_workers) if info else (0, 1)
        own = range(number, SAMPLES, step)
        while self.at < len(own):
            self.at += 1
            yield own[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class WithIterator:
    """Adapts a loader whose iterator has the state: state methods use the iterator of the current epoch."""

    def __init__(self, loader: Any, get: str, put: str) -> None:
        self.loader, self._get, self._put = loader, get, put
        self.iterator: Any = None
        self.state: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.loader)
        state, self.state = self.state, None
        if state is not None:
            getattr(self.iterator, self._put)(state)
        yield from self.iterator
        self.iterator = None

    def state_dict(self) -> Any:
        return None if self.iterator is None else getattr(self.iterator, self._get)()

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _ours(workers: int, folder: Path) -> Any:
    from lightning_turbo import PrefetchLoader

    return PrefetchLoader(Rows(), BATCH, shuffle=True, num_workers=workers)


def _our_stream(workers: int, folder: Path) -> Any:
    from lightning_turbo import PrefetchLoader

    return PrefetchLoader(Stream(), BATCH, num_workers=workers)


def _torchdata(workers: int, folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Rows(), BATCH, shuffle=True, num_workers=workers)


def _torchdata_stream(workers: int, folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Stream(), BATCH, num_workers=workers)


def _hugging_face(workers: int, folder: Path, ours: bool = False) -> Any:
    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader

    from lightning_turbo import PrefetchLoader

    stream: Any = datasets.Dataset.from_dict({"row": list(range(SAMPLES))}).to_iterable_dataset(num_shards=SHARDS)
    return (PrefetchLoader if ours else StatefulDataLoader)(stream.with_format("torch"), BATCH, num_workers=workers)


def _accelerate(workers: int, folder: Path) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    # As at the start of its examples. With worker processes, ``prepare`` draws the order of the first epoch from the
    # global RNG, whatever ``data_seed`` is.
    set_seed(0)
    settings = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    return accelerator.prepare(DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers))


def _grain(workers: int, folder: Path) -> Any:
    import grain

    sampler = grain.samplers.IndexSampler(SAMPLES, shuffle=True, seed=0, num_epochs=1)
    loader = grain.DataLoader(
        data_source=range(SAMPLES), sampler=sampler, worker_count=workers, operations=[grain.transforms.Batch(BATCH)]
    )  # fmt: skip
    return WithIterator(loader, "get_state", "set_state")


def _litdata(workers: int, folder: Path) -> Any:
    import litdata

    if not (folder / "litdata").exists():
        writer = litdata.streaming.writer.BinaryWriter(str(folder / "litdata"), chunk_size=SAMPLES // SHARDS)
        for row in range(SAMPLES):
            writer.add_item(row, row)
        writer.done()
        writer.merge(1)
    data = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True, seed=0)
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


def _mosaic(workers: int, folder: Path) -> Any:
    import streaming

    if not (folder / "mosaic").exists():
        with streaming.MDSWriter(out=str(folder / "mosaic"), columns={"row": "int"}, size_limit=1024) as writer:
            for row in range(SAMPLES):
                writer.write({"row": row})
    data = streaming.StreamingDataset(local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH, shuffle_seed=0)
    return streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


PEERS = {
    "this package, `PrefetchLoader`": Peer(_ours, "torch"),
    "this package, a stream with its state": Peer(_our_stream, "torch"),
    "this package, a stream of Hugging Face": Peer(lambda *args: _hugging_face(*args, ours=True), "datasets"),
    "torchdata, `StatefulDataLoader`": Peer(_torchdata, "torchdata"),
    "torchdata, a stream with its state": Peer(_torchdata_stream, "torchdata"),
    "torchdata, a stream of Hugging Face": Peer(_hugging_face, "datasets"),
    "Accelerate, `use_stateful_dataloader`": Peer(_accelerate, "accelerate"),
    "Grain, `DataLoader`": Peer(_grain, "grain"),
    "litData, `StreamingDataLoader`": Peer(_litdata, "litdata"),
    "Mosaic, `StreamingDataLoader`": Peer(_mosaic, "mosaicml-streaming"),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_report(name: str, stops: int, workers: int) -> None:
    """Print the result of one cell as JSON."""
    from lightning_turbo.testing import report_resume

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        report = report_resume(
            lambda number: PEERS[name].make(number, Path(folder)), stops=stops, workers=workers, epochs=EPOCHS
        )
    found = {"twice": report.twice, "never": report.never, "in_order": report.in_order, "samples": report.samples}
    print_lines(json.dumps(found))


def _cell(name: str, stops: int, workers: int) -> str:
    """Measure a loader in its own process, and return the cell of the table."""
    command = [sys.executable, "-m", "benchmarks", "stops", "--row", name, str(stops), str(workers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"error: {last[:90]}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return f"{found['twice']} / {found['never']} / {'yes' if found['in_order'] else 'no'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stops", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="loaders, for example 'Grain*'")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.row:
        name, stops, workers = options.row
        _print_report(name, int(stops), int(workers))
        return 0
    peers = {
        name: peer
        for name, peer in PEERS.items()
        if _version(peer.package) and any(fnmatch(name, pattern) for pattern in options.only)
    }
    columns = [(stops, workers) for workers in (0, 2) for stops in (1, 3)]
    heads = [f"{stops} {'stop' if stops == 1 else 'stops'}, {workers} workers" for stops, workers in columns]
    print_lines(
        f"Of {EPOCHS} epochs of {SAMPLES} samples: seen twice / never / in the same order. Stops are at random batches "
        "and at the ends of the epochs:",
        "",
        f"| Loader | {' | '.join(heads)} |",
        "|---" * (len(columns) + 1) + "|",
    )
    for name in peers:
        print_lines(f"| {name} | {' | '.join(_cell(name, *column) for column in columns)} |")
    packages = dict.fromkeys(["torch", *(peer.package for peer in peers.values())])
    print_lines("", ", ".join(f"{package} {_version(package)}" for package in packages))
    return 0
