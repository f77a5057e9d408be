"""``python -m benchmarks resume``: how many samples a run repeats or loses when it is resumed in mid-epoch.

Each case stops a run after three steps of its second epoch and resumes it in new processes: Lightning with
``Prefetch``, Lightning alone, and, if they are installed, Lightning with torchdata's ``StatefulDataLoader``, and
Accelerate, as in their documentation.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader

from lightning_turbo.measure import print_lines

__all__ = ["cost", "count", "main"]

SAMPLES, EPOCHS, STOP, SEED = 64, 2, 3, 0
OURS, STATEFUL = "Lightning with Prefetch", "Lightning with StatefulDataLoader"


class Setup(NamedTuple):
    """Settings of a run before or after the stop.

    Attributes:
        ranks: Number of ranks.
        batch_size: Number of samples in a batch of one rank.
        workers: Number of worker processes per rank.
    """

    ranks: int = 1
    batch_size: int = 4
    workers: int = 0


CASES = {
    "the same": (Setup(workers=1), Setup(workers=1)),
    "workers 0 -> 2": (Setup(), Setup(workers=2)),
    "batch 4 -> 8": (Setup(), Setup(batch_size=8)),
    "ranks 2 -> 1": (Setup(ranks=2), Setup(batch_size=8)),
    "ranks 1 -> 2": (Setup(), Setup(ranks=2)),
}


def _loader(setup: Setup, kind: Any = DataLoader) -> Any:
    return kind(range(SAMPLES), setup.batch_size, shuffle=True, num_workers=setup.workers)


def _lightning(setup: Setup, folder: Path, again: bool, tool: str) -> list[Any]:
    import lightning.pytorch as pl

    from lightning_turbo import Prefetch

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append((self.current_epoch, batch.tolist()))
            return self.weight.square()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx) == (1, STOP - 1):
                trainer.save_checkpoint(folder / "run.ckpt")
                trainer.should_stop = True

    pl.seed_everything(SEED, verbose=False)
    net = Net()
    callbacks: list[pl.Callback] = [Prefetch()] if tool == OURS else []
    loader = _loader(setup)
    if tool == STATEFUL:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = _loader(setup, StatefulDataLoader)
    trainer = pl.Trainer(
        accelerator="cpu", devices=setup.ranks, strategy="ddp" if setup.ranks > 1 else "auto", max_epochs=EPOCHS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks if again else [*callbacks, Stop()],
    )  # fmt: skip
    trainer.fit(net, loader, ckpt_path=folder / "run.ckpt" if again else None)
    return net.seen


def _accelerate(setup: Setup, folder: Path, again: bool) -> list[Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(SEED)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, _loader(setup))
    if again:
        accelerator.load_state(str(folder / "run"))
    seen = []
    for epoch in range(int(again), EPOCHS):
        loader.set_epoch(epoch)
        active = accelerator.skip_first_batches(loader, STOP) if again and epoch == 1 else loader
        for number, batch in enumerate(active):
            seen.append((epoch, batch.tolist()))
            accelerator.backward(net(batch[:, None].float()).square().mean())
            optimizer.step()
            if not again and (epoch, number) == (1, STOP - 1):
                accelerator.save_state(str(folder / "run"))
                return seen
    return seen


def _run_rank(tool: str, part: int, folder: Path, cases: Sequence[str]) -> None:
    """Run one rank before (``part=0``) or after (``part=1``) the stop, and save which samples of the epoch it saw."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in cases:
        place = folder / case
        place.mkdir(exist_ok=True)
        setup, again = CASES[case][part], part > 0
        seen = _accelerate(setup, place, again) if tool == "Accelerate" else _lightning(setup, place, again, tool)
        indices = [index for epoch, batch in seen if epoch == 1 for index in batch]
        (place / f"{part}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(indices))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _run_ranks(tool: str, part: int, ranks: int, folder: Path, cases: Sequence[str]) -> None:
    """Run all ranks of one part of some cases to their end.

    Raises:
        RuntimeError: If a rank fails; the message has the output of all ranks.
    """
    jobs = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(ranks):
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "resume"}
        job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(job if ranks > 1 else {})}
        command = [sys.executable, "-m", "benchmarks", "resume", "--part", tool, str(part), str(folder), *cases]
        jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    errors = [job.communicate()[1].decode() for job in jobs]
    if any(job.returncode for job in jobs):
        raise RuntimeError(f"{tool}: {''.join(errors)[-2000:]}")


def count(tool: str, cases: Sequence[str]) -> list[tuple[int, int]]:
    """Return for each case how many samples of the epoch are seen more than once, and how many never."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for part, ranks in itertools.product((0, 1), (1, 2)):
            chosen = [case for case in cases if CASES[case][part].ranks == ranks]
            if chosen:
                _run_ranks(tool, part, ranks, folder, chosen)
        counts = []
        for case in cases:
            files = (folder / case).glob("*.json")
            seen = Counter(index for path in files for index in json.loads(path.read_text()))
            counts.append((sum(times > 1 for times in seen.values()), SAMPLES - len(seen)))
        return counts


def _cells(tool: str, cases: Sequence[str]) -> list[str]:
    """Return the cells of a column. If not all cases run, each is run alone, and an error has its last line."""
    try:
        return [f"{twice} / {never}" for twice, never in count(tool, cases)]
    except RuntimeError as error:
        if len(cases) == 1:
            return [f"error: {str(error).strip().splitlines()[-1][:90]}"]
        return [_cells(tool, [case])[0] for case in cases]


def cost(rounds: int, batches: int = 2000) -> dict[str, list[float]]:
    """Return microseconds per step with a ``PrefetchLoader``, alternately without and with ``ExactResume``."""
    import lightning.pytorch as pl

    from lightning_turbo import ExactResume, PrefetchLoader

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.started, self.seconds = torch.nn.Parameter(torch.zeros(())), 0.0, 0.0

        def on_train_start(self) -> None:
            self.started = time.perf_counter()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.weight.square()

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.started

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    microseconds: dict[str, list[float]] = {"without": [], "with": []}
    for number, name in itertools.product(range(rounds + 1), microseconds):
        net, data = Net(), cast(Any, range(4 * batches))
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[ExactResume()] if name == "with" else [],
        )  # fmt: skip
        trainer.fit(net, PrefetchLoader(data, 4, shuffle=True))
        if number:  # the first round is a warm-up
            microseconds[name].append(1e6 * net.seconds / batches)
    return microseconds


def _print_cost(rounds: int) -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    both = cost(rounds)
    differences = [second - first for first, second in zip(*both.values(), strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    print_lines(
        f"A step takes {statistics.median(both['without']):.0f} microseconds without ExactResume and "
        f"{statistics.median(both['with']):.0f} with it. The median difference of {rounds} rounds is {middle:+.1f}, "
        f"with quartiles of {low:+.1f} and {high:+.1f}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks resume", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), help="cases (default: all)")
    parser.add_argument("--cost", type=int, metavar="ROUNDS", help="measure what ExactResume adds to a step instead")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.part:
        tool, part, folder, *cases = options.part
        _run_rank(tool, int(part), Path(folder), cases)
        return 0
    if options.cost:
        _print_cost(options.cost)
        return 0
    needs = {OURS: "torch", "Lightning": "torch", STATEFUL: "torchdata", "Accelerate": "accelerate"}
    tools = [tool for tool, package in needs.items() if importlib.util.find_spec(package)]
    cells = [_cells(tool, options.only) for tool in tools]
    print_lines(
        f"Of {SAMPLES} samples of the epoch, seen twice / never:", "", f"| What changes | {' | '.join(tools)} |"
    )
    print_lines("|---" * (len(tools) + 1) + "|")
    for case, *row in zip(options.only, *cells, strict=True):
        print_lines(f"| {case} | {' | '.join(row)} |")
    return 0
