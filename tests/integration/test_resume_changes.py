"""Resumed runs with another batch size, or another number of workers, ranks or nodes."""

import itertools
import json
import os
import random
import signal
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed.run
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import ExactResume, Prefetch, PrefetchLoader, SeededSampler
from lightning_turbo.callbacks.exact_resume import KEY
from lightning_turbo.errors import TurboWarning
from tests.data.samples import Rows, Stream
from tests.integration.recording import gives
from tests.ranks import free_port, rank_command, run_ranks, start
from tests.trainers import quiet_trainer
from tests.versions import unpickling

# torchdata calls a deprecated function of torch.
pytestmark = [
    pytest.mark.usefixtures("every_loader_has_a_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Net(pl.LightningModule):
    """Records the epoch, the index of the batch, the number of batches of the epoch, and the rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.steps = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, self.trainer.num_training_batches, batch))
        self.steps.append(self.global_step)
        return self.weight.square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(pl.Callback):
    """Saves a checkpoint after a given number of steps and ends the run."""

    def __init__(self, path, steps):
        self.path, self.left = path, steps

    def on_train_batch_end(self, trainer, *_):
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class RecordingNet(Net):
    """Records the batches of each loader, and has a learning rate that is halved after each epoch."""

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"a": batch}
        seen = {name: [] if part is None else part.tolist() for name, part in parts.items()}
        self.seen.append((self.current_epoch, batch_idx, self.trainer.num_training_batches, seen))
        return self.weight.square()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Validations(pl.Callback):
    def __init__(self):
        self.after = []

    def on_validation_start(self, trainer, module):
        self.after.append(module.seen[-1][:2])


def loader(length, batch_size, drop_last=False):
    data = Rows(length)
    return DataLoader(data, batch_size, sampler=SeededSampler(data, 1), drop_last=drop_last)


def fit(data, *callbacks, ckpt=None, validation=None, **settings):
    model = RecordingNet()
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[*callbacks], **settings)
    if validation is not None:
        model.validation_step = lambda batch, batch_idx: None
    trainer.fit(model, data, validation, ckpt_path=ckpt, **unpickling(True if ckpt else None))
    return model.seen, trainer


def run_attempts(make, sizes, stops, folder, **settings):
    """Return the batches of a run that is stopped after each number of steps and resumed with the next batch size."""
    seen, path = [], None
    for number, (size, stop) in enumerate(itertools.zip_longest(sizes, stops)):
        here = folder / str(number)
        saves = [Stop(here, stop)] if stop else []
        more, trainer = fit(make(size), Prefetch(), *saves, ckpt=path, **settings)
        seen, path = seen + more, here
    return seen, trainer


@pytest.mark.parametrize("sizes", [(4, 2, 3), (3, 5, 1), (2, 4, 4)])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_resume_with_another_batch_size(mode, sizes, tmp_path):
    def make(size):
        return CombinedLoader({"a": loader(29, size), "b": loader(12, size)}, mode)

    seen, _ = run_attempts(make, sizes, (2, 1), tmp_path)
    for epoch in (0, 1):
        steps = [step for step in seen if step[0] == epoch]
        a, b = ([index for *_, parts in steps for index in parts[name]] for name in "ab")
        assert len(set(a)) == len(a)
        assert len(a) == 29 or mode == "min_size"
        assert set(b) == set(range(12))
        assert len(b) == 12 or mode == "max_size_cycle"
        assert steps[-1][1] == steps[-1][2] - 1


@pytest.mark.parametrize(("sizes", "settings", "left"), [
    ((4, 2), {}, 5),  # 20 of 29 samples are used and 9 remain
    ((4, 2), {"limit_train_batches": 12}, 2),  # of 24
    ((4, 2), {"limit_train_batches": 6}, 0),  # of 12
    ((4, 10), {"drop_last": True}, 0),  # 9 make no batch
])  # fmt: skip
def test_a_resumed_epoch_has_only_the_remaining_batches(sizes, settings, left, tmp_path):
    drop_last = settings.pop("drop_last", False)
    seen, trainer = run_attempts(lambda size: loader(29, size, drop_last), sizes, (5,), tmp_path, **settings)
    length = trainer.num_training_batches
    rest = [(epoch, number) for epoch, number, *_ in seen[5:]]
    assert rest == [(0, number) for number in range(length - left, length)] + [(1, number) for number in range(length)]
    assert trainer.global_step == trainer.fit_loop.epoch_loop._batches_that_stepped == 5 + left + length
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_accumulation_and_validation_follow_the_new_number_of_batches(tmp_path):
    settings = {"validation": DataLoader(Rows(2)), "val_check_interval": 0.25}
    fit(loader(64, 8), Prefetch(), Stop(tmp_path / "c", 3), **settings)
    checks = Validations()
    seen, trainer = fit(
        loader(64, 4), Prefetch(), checks, ckpt=tmp_path / "c", accumulate_grad_batches=2, **settings
    )  # fmt: skip
    assert [number for epoch, number, *_ in seen if epoch == 0] == list(range(6, 16))
    assert checks.after == [(0, 7), (0, 11), (0, 15), (1, 3), (1, 7), (1, 11), (1, 15)]
    assert trainer.global_step == 3 + 5 + 8
    assert trainer.estimated_stepping_batches == 16


def test_a_loader_with_an_unknown_order_warns_about_a_changed_number_of_ranks(tmp_path):
    def stateful():
        return StatefulDataLoader(Rows(24), 2, sampler=DistributedSampler(range(24), 2, 0))

    fit(stateful(), ExactResume(), Stop(tmp_path / "c", 3), use_distributed_sampler=False)
    saved = torch.load(tmp_path / "c", weights_only=True)
    torch.save({**saved, KEY: [{**each, "ranks": 2, "data_ranks": 2} for each in saved[KEY] * 2]}, tmp_path / "c")
    said = "goes on with 1 ranks x 2 samples in place of 2 x 2.*12 were used, and 6 count.*about 6 are seen twice"
    with pytest.warns(TurboWarning, match=said):
        fit(stateful(), ExactResume(), ckpt=tmp_path / "c")


def test_torchdatas_loader_warns_about_a_changed_batch_size(tmp_path):
    fit(StatefulDataLoader(Rows(24), 2), ExactResume(), Stop(tmp_path / "c", 3))
    said = "goes on with 1 ranks x 4 samples in place of 1 x 2.*6 were used, and 12 .*about 6 are seen never"
    with pytest.warns(TurboWarning, match=said):
        seen, _ = fit(StatefulDataLoader(Rows(24), 4), ExactResume(), ckpt=tmp_path / "c")
    assert len([index for epoch, *_, parts in seen if epoch == 0 for index in parts["a"]]) == 24 - 6 - 6


@pytest.mark.parametrize("size", [2, 8])
def test_a_stream_warns_about_a_changed_batch_size(size, tmp_path):
    """Its batches are counted, and so are those of the new size."""
    fit(DataLoader(Stream(29), 4), Prefetch(), Stop(tmp_path / "c", 2))
    said = f"2 batches of this epoch were used, but not which ones: .* None batches of 4 .* has no length of {size} now"
    with pytest.warns(TurboWarning, match=said):
        seen, _ = fit(DataLoader(Stream(29), size), Prefetch(), ckpt=tmp_path / "c")
    assert [index for epoch, *_, parts in seen if epoch == 0 for index in parts["a"]] == list(range(2 * size, 29))


# Other numbers of ranks and workers, and other batch sizes: each sample is used once, in the same order, unchanged.

RANKS = 2, 1, 2
BATCHES = 4, 8, 3  # samples per batch of a rank in each attempt
SEED, EPOCHS = 5, 2


class Case(NamedTuple):
    name: int
    length: int
    seeded: bool  # with a SeededSampler; otherwise with Lightning's samplers for shuffle=True
    drop_last: bool
    workers: tuple[int, ...]
    stops: tuple[int, ...]  # steps of each attempt


def case_of(name):
    """Return a case with a random length, workers and stops, seeded by its number."""
    rng = random.Random(str(name))
    length = 2 * rng.randint(12, 32)
    workers = tuple(rng.sample((0, 1, 2), 3))
    first = rng.randint(1, length // 8)  # the first two attempts use 8 samples per step
    stops = first, rng.randint(1, length // 8 * 2 - first - 1)
    return Case(name, length, rng.random() < 0.5, rng.random() < 0.3, workers, stops)


def augmented(index):
    """Return the index and a random number of each generator."""
    return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def run_attempt(folder, attempt, names):
    """Run one attempt of each case on a rank, and save the rows of its steps."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for case in map(case_of, names):
        data = Rows(case.length, augmented)
        order = {"sampler": SeededSampler(data, SEED)} if case.seeded else {"shuffle": True}
        workers = case.workers[attempt]
        loader = DataLoader(data, BATCHES[attempt], num_workers=workers, drop_last=case.drop_last, **order)
        before, after = (folder / f"{case.name}-{number}.ckpt" for number in (attempt - 1, attempt))
        stops = [Stop(after, case.stops[attempt])] if attempt < len(case.stops) else []
        model = Net()
        trainer = quiet_trainer(
            devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=EPOCHS, num_sanity_val_steps=0,
            callbacks=[Prefetch(sample_seeds=SEED), *stops],
        )  # fmt: skip
        trainer.fit(model, loader, ckpt_path=before if attempt else None, **unpickling(True if attempt else None))
        torch.save({"seen": model.seen, "steps": model.steps}, folder / f"{case.name}-{attempt}.{rank}")


def expected(case):
    """Return the rows of each epoch in one uninterrupted process, in the order of a ``SeededSampler``."""
    data = Rows(case.length, augmented)
    loader = PrefetchLoader(data, 1, sampler=SeededSampler(data, SEED), sample_seeds=SEED)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        yield torch.cat(list(loader))


def rows_of(folder, case):
    """Return the rows of all attempts by epoch, in the order of the samples over all ranks, and the steps."""
    rows, steps = defaultdict(list), []
    for attempt, ranks in enumerate(RANKS):
        parts = [torch.load(folder / f"{case.name}-{attempt}.{rank}", weights_only=True) for rank in range(ranks)]
        steps += parts[0]["steps"]
        for each in zip(*(part["seen"] for part in parts), strict=True):
            epoch, number, length, _ = each[0]
            rows[epoch] += [row for turn in zip(*(batch for *_, batch in each), strict=True) for row in turn]
            last = case.length % (ranks * BATCHES[attempt])
            assert number < length == case.length // (ranks * BATCHES[attempt]) + (last > 0 and not case.drop_last)
    return rows, steps


def check(folder, names, timeout=150):
    for attempt, ranks in enumerate(RANKS):
        run_ranks(run_attempt, folder, attempt, names, ranks=ranks, timeout=timeout)
    for case in map(case_of, names):
        rows, steps = rows_of(folder, case)
        assert steps == list(range(len(steps))), case
        for epoch, whole in enumerate(expected(case)):
            seen = torch.stack(rows[epoch])
            # With drop_last, the samples that do not fill a batch in the last attempt of the epoch are dropped.
            assert case.length - case.drop_last * max(RANKS) * max(BATCHES) <= len(seen) <= case.length, case
            assert seen[:, 0].unique().numel() == len(seen), case
            if case.seeded:
                assert torch.equal(seen, whole[: len(seen)]), case
            else:  # another order, the same augmentation
                assert torch.equal(seen, whole[whole[:, 0].argsort()][seen[:, 0].long()]), case


@pytest.mark.filterwarnings("ignore:Loading a batch draws")
@pytest.mark.distributed
def test_each_sample_is_seen_once_after_ranks_workers_and_batch_sizes_change(tmp_path):
    check(tmp_path, [1, 4, 7])


@pytest.mark.filterwarnings("ignore:Loading a batch draws")
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_each_sample_is_seen_once_in_thirty_runs_with_random_stops(tmp_path):
    check(tmp_path, range(30), timeout=800)


# Fewer nodes: torchrun continues on one of two nodes after the other was killed.

LENGTH, BATCH = 64, 4


class Slow(Net):
    """Writes the number, the epoch, the length of the epoch and the samples of each step to a file."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def training_step(self, batch, batch_idx):
        time.sleep(0.3)
        line = [self.global_step, self.current_epoch, self.trainer.num_training_batches, batch[:, 0].int().tolist()]
        print(json.dumps(line), file=self.file, flush=True)
        return super().training_step(batch, batch_idx)


def train_on_nodes(folder):
    """Train on a rank, starting from its last checkpoint."""
    folder, nodes = Path(folder), int(os.environ["GROUP_WORLD_SIZE"])
    name = f"{nodes}.{os.environ['RANK']}"
    trainer = quiet_trainer(
        num_nodes=nodes, strategy="ddp", max_epochs=2, enable_checkpointing=True, num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_last=True)],
    )  # fmt: skip
    again = (folder / "saved/last.ckpt").exists()
    with open(folder / name, "w") as file:
        data = gives(DataLoader(Rows(LENGTH, augmented), BATCH, shuffle=True, num_workers=1), sample_seeds=1)
        trainer.fit(Slow(file), data, ckpt_path="last" if again else None, **unpickling(True if again else None))


def agent(folder, number, port):
    words = [
        "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--local-addr", "127.0.0.1", "--rdzv-conf",
        f"is_host={int(number == 0)},last_call_timeout=5", *rank_command(train_on_nodes, folder),
    ]  # fmt: skip
    return start(torch.distributed.run.main, [words], folder / "said", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill(job):
    """Kill an agent and its ranks at once, as when a machine is switched off."""
    for pid in [job.pid, *children(job.pid)] if job.is_alive() else []:
        os.kill(pid, signal.SIGKILL)
    job.join()


def steps(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_one_node_resumes_a_run_of_two_nodes(tmp_path):
    with ExitStack() as running:
        port, said = free_port(), tmp_path / "said"
        jobs = [agent(tmp_path, number, port) for number in (0, 1)]
        for job in jobs:
            running.callback(kill, job)
        until = time.monotonic() + 120
        while len(steps(tmp_path / "2.0")) < 5 and time.monotonic() < until:
            time.sleep(0.05)
        kill(jobs[1])
        jobs[0].join(timeout=200)
        assert jobs[0].exitcode == 0, said.read_text()[-5000:]
    both, alone = [steps(tmp_path / f"2.{rank}") for rank in (0, 1)], steps(tmp_path / "1.0")
    resumed = alone[0][0]
    assert 2 <= resumed <= len(both[0])
    assert [line[0] for line in alone] == list(range(resumed, resumed + len(alone)))
    assert {line[2] for line in alone} == {LENGTH // BATCH}
    lines = [line for rank in both for line in rank if line[0] < resumed] + alone
    seen = sorted((epoch, index) for _, epoch, _, indices in lines for index in indices)
    assert seen == [(epoch, index) for epoch in (0, 1) for index in range(LENGTH)]
    assert f"goes on at sample {resumed * 2 * BATCH} of {LENGTH}" in said.read_text()
