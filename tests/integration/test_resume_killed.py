"""A rank is killed at any moment, or Slurm ends the job: the restarted run has the same results, bit for bit."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.run
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import ApexAMP, AtomicCheckpointIO, ExactAccumulation, PrefetchLoader, TurboDDPStrategy
from lightning_turbo.data.loading import prefetcher
from tests.data.samples import Rows, seeded
from tests.integration import test_ranks
from tests.integration.recording import Numbers, RecordingModel, fit, gives
from tests.integration.resuming import assert_same
from tests.ranks import end, free_port, rank_command, start
from tests.trainers import quiet_trainer
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")

# Two ranks that kill themselves at given moments, once for each.

PLACES = ("forward", "write", "backward", "prefetch", "place", "random")
LEVELS = ("O1", "O2")
SAMPLES, BATCH, WINDOW = 96, 4, 2
STEPS_OF_AN_EPOCH = SAMPLES // (2 * BATCH * WINDOW)


class Kill:
    """The first planned kill that has not happened yet. If none is left, ``at`` does nothing.

    Args:
        folder: Where a file for each kill that happened is written.
        plan: All kills, in order.
    """

    def __init__(self, folder, plan):
        left = [(folder / f"kill.{n}", kill) for n, kill in enumerate(plan) if not (folder / f"kill.{n}").exists()]
        self.mark, (self.where, rank, step, seed) = left[0] if left else (None, (None, -1, 0, 0))
        self.mine = int(rank) == int(os.environ["RANK"])
        self.step, self.random = int(step), random.Random(seed)
        self.reached = threading.Event()
        self.thread = None

    def at(self, where):
        """Kill this process if the place and the rank are those of the kill, and its step has come."""
        if self.mine and self.where == where and self.reached.is_set():
            self.now()

    def now(self):
        os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)

    def arm(self):
        """Watch files being written, or wait for a random moment in a thread."""
        if not self.mine:
            return
        if self.where == "write":
            save = torch.save
            torch.save = lambda content, file, **kwargs: save(content, Dying(file, self), **kwargs)
        elif self.where == "place":
            replace = os.replace
            os.replace = lambda *paths: (self.at("place"), replace(*paths))
        elif self.where == "random":
            self.thread = threading.Thread(target=self.any_moment, daemon=True)
            self.thread.start()

    def any_moment(self):
        self.reached.wait()
        threading.Event().wait(self.random.uniform(0, 0.1))
        self.now()


class Dying:
    """A file whose process is killed after half a MiB of a checkpoint is written to it."""

    def __init__(self, file, kill):
        self.file, self.kill, self.count = file, kill, 0

    def write(self, data):
        self.count += memoryview(data).nbytes
        written = self.file.write(data)
        self.file.flush()
        if self.count > 2**19:
            self.kill.at("write")
        return written

    def flush(self):
        self.file.flush()


def samples(kill):
    generator = seeded()
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)

    def load(index):
        kill.at("prefetch")
        return x[index], y[index]

    return Rows(SAMPLES, load)


class Net(pl.LightningModule):
    def __init__(self, kill):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Linear(16, 3)
        self.kill = kill

    def training_step(self, batch, index):
        hidden = self.first(batch[0])
        self.kill.at("forward")
        hidden.register_hook(lambda gradient: self.kill.at("backward"))
        loss = nn.functional.cross_entropy(self.second(hidden).float(), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=7, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["ballast"] = torch.zeros(2**18)  # 1 MiB, so that writing takes a while


class Attempts(pl.Callback):
    """Gives the kill the progress of the run, and writes where each attempt started and the result of the last one."""

    def __init__(self, kill, folder):
        self.kill, self.folder = kill, folder

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            attempt = {"attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "step": trainer.global_step}
            with open(self.folder / "attempts", "a") as file:
                file.write(json.dumps(attempt) + "\n")
        self.kill.arm()

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step >= self.kill.step:
            self.kill.reached.set()

    def on_train_end(self, trainer, module):
        if self.kill.thread is not None:
            self.kill.thread.join()  # it ends this process
        final = {
            "module": {name: value.clone() for name, value in module.state_dict().items()},
            "masters": [p.detach().clone() for g in trainer.optimizers[0].param_groups for p in g["params"]],
            "optimizer": trainer.optimizers[0].state_dict(),
            "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "step": trainer.global_step,
            "loss": trainer.callback_metrics["loss"],
        }
        torch.save(final, self.folder / f"final.{trainer.global_rank}")


def train(level, folder, kills, epochs):
    """Train on a rank in one attempt of the job.

    Args:
        level: The level of ApexAMP.
        folder: The folder of the job.
        kills: A comma-separated list of ``where:rank:step:seed``; one happens in each attempt, in order.
        epochs: The epochs of the uninterrupted run.
    """
    prefetcher.MIN_SECONDS = 0.0  # these samples load fast, but must be loaded in the background
    folder = Path(folder)
    for path in folder.rglob("*.ckpt"):  # files of the previous attempt
        torch.load(path, weights_only=True)
    kill = Kill(folder, [kill.split(":") for kill in kills.split(",") if kill])
    saves = ModelCheckpoint(
        folder / "checkpoints", filename="{step}", every_n_train_steps=2, save_last=True, enable_version_counter=False
    )
    # One level saves in the background.
    strategy = TurboDDPStrategy(checkpoint_io=AtomicCheckpointIO(background=level == "O2"))
    trainer = quiet_trainer(
        devices=2, strategy=strategy, max_epochs=int(epochs), accumulate_grad_batches=WINDOW,
        callbacks=[saves, Attempts(kill, folder)], plugins=[ApexAMP(level, dtype=torch.bfloat16)],
        gradient_clip_val=1.0, enable_checkpointing=True,
    )  # fmt: skip
    data = gives(DataLoader(samples(kill), batch_size=BATCH, shuffle=True), prefetch_batches=2)
    trainer.fit(Net(kill), data, ckpt_path="last", **unpickling(True))


def start_forks(level, folder, kills, epochs):
    """Start both ranks with torchrun's agent, from a process that has imported everything."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="killed", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=len(kills.split(",")), monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, train)(level, folder, kills, epochs)


def planned(places, seed, epochs):
    """Return kills in these places at increasing random steps and in a random rank. Only rank 0 writes files."""
    chance = random.Random(seed)
    apart = (epochs * STEPS_OF_AN_EPOCH - 6) / len(places)
    return ",".join(
        f"{where}:{0 if where in ('write', 'place') else chance.randrange(2)}"
        f":{2 + int(apart * (n + chance.random()))}:{chance.randrange(1000)}"
        for n, where in enumerate(places)
    )


def run(folder, level, epochs, kills="", torchrun=False):
    """Run a job to its end, repeatedly load every existing checkpoint, and return how many were loaded.

    Every file that is named as a checkpoint must load at every moment.
    """
    folder.mkdir()
    # By default torchrun keeps one store for all attempts of a job, and a rank of a new attempt can find addresses of
    # the previous one.
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = (level, folder, kills, epochs)
    if torchrun:
        launch = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(kills.split(",")))]
        command = [*launch, *rank_command(train, *words)]
        job = start(torch.distributed.run.main, [command], folder / "output", **settings)
    else:
        job = start(start_forks, words, folder / "output", **settings)
    loaded, deadline = 0, time.monotonic() + 280
    try:
        while job.is_alive():
            for path in folder.rglob("*.ckpt"):
                try:
                    torch.load(path, weights_only=True)
                except FileNotFoundError:  # replaced by a newer one
                    continue
                loaded += 1
            assert time.monotonic() < deadline, (folder / "output").read_text()[-3000:]
            job.join(timeout=0.02)
    finally:
        end(job)
    assert job.exitcode == 0, (folder / "output").read_text()[-3000:]
    return loaded


def finals(folder):
    return [torch.load(folder / f"final.{rank}", weights_only=True) for rank in (0, 1)]


def check(undisturbed, killed, kills, epochs):
    """Check that the job had one attempt more than kills, resumed from a checkpoint, and ended with the same bits."""
    assert len(list(killed.glob("kill.*"))) == kills
    attempts = [json.loads(line) for line in (killed / "attempts").read_text().splitlines()]
    assert [attempt["attempt"] for attempt in attempts] == list(range(kills + 1))
    began = [attempt["step"] for attempt in attempts]
    assert began == sorted(began)
    assert began[0] == 0
    assert any(step % STEPS_OF_AN_EPOCH for step in began), began  # in the middle of an epoch
    assert began[-1] > 0
    for rank, (ours, theirs) in enumerate(zip(finals(killed), finals(undisturbed), strict=True)):
        assert ours["step"] == epochs * STEPS_OF_AN_EPOCH
        assert_same(ours, theirs, f"rank {rank}")
    assert list(killed.rglob("*.partial")) == []  # partial files of killed writers are removed


@pytest.mark.distributed
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    run(tmp_path / "undisturbed", "O2", epochs=2)
    assert run(tmp_path / "killed", "O2", 2, kills="backward:1:9:0") > 0
    check(tmp_path / "undisturbed", tmp_path / "killed", kills=1, epochs=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the folder of an uninterrupted run of a level, which runs once."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def of(level):
        if not (folder / level).exists():
            run(folder / level, level, epochs=4)
        return folder / level

    return of


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(3))
def test_runs_with_thirty_kills_equal_uninterrupted_ones(level, seed, undisturbed, tmp_path):
    """Six kills per job, one in each place and one at any moment: thirty-six in all, twelve of them under torchrun.

    The others use torchrun's agent with forked ranks, which saves the imports of every attempt.
    """
    places = random.Random(seed).sample(PLACES, len(PLACES))
    kills = planned(places, seed=10 * seed + int(level[1]), epochs=4)
    run(tmp_path / "killed", level, 4, kills, torchrun=seed == 0)
    check(undisturbed(level), tmp_path / "killed", len(places), epochs=4)


# Repeated restarts in one process.


class RecordingEpochStarts(RecordingModel):
    """Also records the starts of epochs, and has an optimizer and a scheduler with states."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_train_epoch_start(self):
        self.epochs.append(self.current_epoch)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AfterValidation(ModelCheckpoint):
    """A ModelCheckpoint with its own state key."""


def dealt(cls, **settings):
    """Return a loader with the shuffled sampler that Lightning sets in each of two ranks."""
    return lambda: cls(Numbers(6), sampler=DistributedSampler(range(6), 2, 1), **settings)


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:'set_vital' is deprecated")
@pytest.mark.filterwarnings("ignore:.*have no .val_dataloader")
@pytest.mark.parametrize("stops", [(2, 3), pytest.param(range(10), marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize(("loader", "settings"), [
    pytest.param(lambda: PrefetchLoader(Numbers(3)), {"max_epochs": 3}, marks=pytest.mark.slow),
    (dealt(PrefetchLoader, num_workers=1), {"max_epochs": 3}),
    pytest.param(dealt(StatefulDataLoader, num_workers=1), {"max_epochs": -1, "max_steps": 9}, marks=pytest.mark.slow),
    (dealt(StatefulDataLoader), {"max_epochs": 3, "val_check_interval": 2}),
], ids=["in order", "one rank", "StatefulDataLoader", "validating"])  # fmt: skip
def test_a_second_restart_resumes_exactly(loader, settings, stops, tmp_path):
    """From checkpoints of the last step of an epoch, of the end of an epoch, and of the epoch after it."""
    validation = DataLoader(Numbers(1)) if "val_check_interval" in settings else None

    def go(name, path=None):
        folder = tmp_path / name
        saves = [
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
            ModelCheckpoint(folder, filename="end-{step}", save_on_train_epoch_end=True, save_top_k=-1),
            AfterValidation(folder, filename="val-{step}", save_on_train_epoch_end=False, save_top_k=-1),
        ]
        settings.update(model=RecordingEpochStarts, strategy="turbo", enable_checkpointing=True)
        return fit(loader(), *saves, validation=validation, ckpt_path=path, **settings), sorted(folder.glob("*.ckpt"))

    whole, paths = go("whole")
    assert len(whole.seen) == 9
    for path, first in [(path, int(path.stem.partition("=")[2])) for path in paths]:
        if first not in stops:
            continue
        once, later = go(path.stem, path)
        assert once.seen == whole.seen[first:], path.stem
        assert once.epochs == list(range(-(-first // 3), 3)), path.stem
        for next_path in later:
            second = int(next_path.stem.partition("=")[2])
            if second < min(first + 3, 9):
                twice, _ = go(f"{path.stem}-{next_path.stem}", next_path)
                assert twice.seen == whole.seen[second:], (path.stem, next_path.stem)
                assert_same(twice.state_dict(), whole.state_dict(), f"{path.stem} {next_path.stem}")


# Slurm announces the end of a job: Lightning saves a checkpoint, and the requeued job equals an uninterrupted one.


SLURM = {
    "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train",
}  # fmt: skip


class Signaled(test_ranks.Net):
    def __init__(self, signal_at):
        super().__init__()
        self.signal_at, self.tests = signal_at, 0

    def training_step(self, batch, index):
        if (self.current_epoch, index) == self.signal_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.tests += not self.trainer.sanity_checking


def train_under_slurm(folder, batch=None, ranks=""):
    """Train three epochs of ten batches in windows of four. Every rank has its own order.

    Args:
        folder: The folder of the job.
        batch: The batch of the second epoch in which a rank gets the signal. None: no signal, because the job
            resumes after it.
        ranks: The ranks that get the signal.
    """
    rank, resumed = os.environ["SLURM_PROCID"], batch is None
    model = Signaled((1, batch) if rank in ranks else None)
    data = Subset(test_ranks.SAMPLES, range(40))
    generator = seeded(int(rank) + 10 * resumed)
    trainer = quiet_trainer(
        devices=2, strategy=TurboDDPStrategy(), max_epochs=3, default_root_dir=folder,
        accumulate_grad_batches=4, use_distributed_sampler=False, plugins=[ApexAMP("O2", dtype=torch.bfloat16)],
        callbacks=[ExactAccumulation()],
    )  # fmt: skip
    trainer.fit(model, PrefetchLoader(data, batch_size=4, shuffle=True, generator=generator), DataLoader(data, 40))
    result = {"module": model.state_dict(), "seen": model.seen, "steps": trainer.global_step, "tests": model.tests}
    torch.save(result, folder / f"{'requeued' if resumed else 'signaled'}.{rank}")


def srun(folder, *arguments):
    """Run two ranks to their end, as srun does."""
    job = {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    job["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    jobs = [
        start(train_under_slurm, [folder, *arguments], folder / "output", **job, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        for rank in ("0", "1")
    ]
    try:
        for job in jobs:
            job.join(timeout=150)
        codes = [job.exitcode for job in jobs]
    finally:
        for job in jobs:
            end(job)
    assert codes == [0, 0], (folder / "output").read_text()[-3000:]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="Lightning 2.6 communicates signals on the host")
@pytest.mark.parametrize(("batch", "ranks", "saved"), [(2, "01", 18), (2, "1", 18), (5, "0", 20)])
def test_a_requeued_slurm_job_equals_an_uninterrupted_one(batch, ranks, saved, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\n')
    (tmp_path / "scontrol").chmod(0o755)
    srun(tmp_path, batch, ranks)  # it trains on to its end, as it would have without the signal
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
    srun(tmp_path)
    for rank in (0, 1):
        signaled, requeued = (torch.load(tmp_path / f"{name}.{rank}") for name in ("signaled", "requeued"))
        assert signaled["steps"] == requeued["steps"] == 9
        assert (len(signaled["seen"]), signaled["tests"], requeued["tests"]) == (30, 3, 2 if saved < 20 else 1)
        assert requeued["seen"] == signaled["seen"][saved:]
        assert all(torch.equal(requeued["module"][name], value) for name, value in signaled["module"].items())
