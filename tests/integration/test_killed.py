"""A rank is killed at any moment: the job comes back, no checkpoint is half, and no bit of the end differs."""

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_turbo import PrefetchLoader
from tests.integration.killed_worker import STEPS_OF_AN_EPOCH
from tests.integration.noting import Noting, Numbers, fit
from tests.integration.resuming import assert_same
from tests.ranks import ENVIRONMENT, RANK_SCRIPT, end, start

pytestmark = pytest.mark.usefixtures("every_loader_has_a_thread")

WORKER = Path(__file__).with_name("killed_worker.py")
PLACES = ("forward", "write", "backward", "prefetch", "place", "random")
LEVELS = ("O1", "O2")
# By default torchrun keeps one store for all lives of a job, and a rank of the new life can find addresses of the old.
SETTINGS = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def planned(places, seed, epochs):
    """Kills in these places, at steps of chance that lie in a row, in a rank of chance; only rank 0 writes files."""
    chance = random.Random(seed)
    apart = (epochs * STEPS_OF_AN_EPOCH - 6) / len(places)
    return ",".join(
        f"{where}:{0 if where in ('write', 'place') else chance.randrange(2)}"
        f":{2 + int(apart * (n + chance.random()))}:{chance.randrange(1000)}"
        for n, where in enumerate(places)
    )


def run(folder, level, epochs, kills="", torchrun=False):
    """Run a job to its end while loading every checkpoint that is there, again and again; return how many were loaded.

    Every file that is named as a checkpoint must load at every moment.
    """
    folder.mkdir()
    restarts = ["--max-restarts", str(len(kills.split(",")))]
    launch = [torch.distributed.run.__file__, "--standalone", "--nproc-per-node", "2", *restarts, RANK_SCRIPT, WORKER]
    command = [*(launch if torchrun else (WORKER, "fork")), level, folder, kills, epochs]
    loaded, deadline = 0, time.monotonic() + 280
    job = start(command, {**os.environ, **SETTINGS}, folder / "output")
    try:
        while job.is_alive():
            for path in folder.rglob("*.ckpt"):
                try:
                    torch.load(path, weights_only=True)
                except FileNotFoundError:  # removed for a newer one
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
    """The job had a life more than kills, went on from a checkpoint, and ended as the undisturbed one, bit for bit."""
    assert len(list(killed.glob("kill.*"))) == kills
    lives = [json.loads(line) for line in (killed / "lives").read_text().splitlines()]
    assert [life["life"] for life in lives] == list(range(kills + 1))
    began = [life["step"] for life in lives]
    assert began == sorted(began)
    assert began[0] == 0
    assert any(step % STEPS_OF_AN_EPOCH for step in began), began  # in the middle of an epoch
    assert began[-1] > 0
    for rank, (ours, theirs) in enumerate(zip(finals(killed), finals(undisturbed), strict=True)):
        assert ours["step"] == epochs * STEPS_OF_AN_EPOCH
        assert_same(ours, theirs, f"rank {rank}")
    assert list(killed.rglob("*.partial")) == []  # what killed writers left was removed


@pytest.mark.distributed
def test_a_kill_changes_no_bit(tmp_path):
    run(tmp_path / "undisturbed", "O2", epochs=2)
    assert run(tmp_path / "killed", "O2", 2, kills="backward:1:9:0") > 0
    check(tmp_path / "undisturbed", tmp_path / "killed", kills=1, epochs=2)


class Recording(Noting):
    """Notes when epochs start, too, and has an optimizer and a schedule with states."""

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
    """One whose state has a name of its own."""


def dealt(cls, **settings):
    """A loader with the shuffled sampler that Lightning places in each of two ranks."""
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
def test_a_second_restart_goes_on_where_the_first_would_have(loader, settings, stops, tmp_path):
    """Also from a checkpoint of an epoch's last step, of a whole epoch, and from one in the epoch after it."""
    validation = DataLoader(Numbers(1)) if "val_check_interval" in settings else None

    def go(name, path=None):
        folder = tmp_path / name
        saves = [
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
            ModelCheckpoint(folder, filename="end-{step}", save_on_train_epoch_end=True, save_top_k=-1),
            AfterValidation(folder, filename="val-{step}", save_on_train_epoch_end=False, save_top_k=-1),
        ]
        settings.update(model=Recording, strategy="turbo", enable_checkpointing=True)
        return fit(loader(), *saves, validation=validation, ckpt_path=path, **settings), sorted(folder.glob("*.ckpt"))

    whole, paths = go("whole")
    assert len(whole.seen) == 9
    for path, first in [(path, int(path.stem.partition("=")[2])) for path in paths]:
        if first not in stops:
            continue
        once, again = go(path.stem, path)
        assert once.seen == whole.seen[first:], path.stem
        assert once.epochs == list(range(-(-first // 3), 3)), path.stem
        for next_path in again:
            second = int(next_path.stem.partition("=")[2])
            if second < min(first + 3, 9):
                twice, _ = go(f"{path.stem}-{next_path.stem}", next_path)
                assert twice.seen == whole.seen[second:], (path.stem, next_path.stem)
                assert_same(twice.state_dict(), whole.state_dict(), f"{path.stem} {next_path.stem}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Gives the folder of an undisturbed run of a level, made once."""
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
def test_thirty_kills_change_no_bit(level, seed, undisturbed, tmp_path):
    """Six kills a job, one in each place and one at any moment: thirty-six in all, twelve under torchrun itself.

    The others run on torchrun's agent with ranks that are forked, which saves the imports of every life.
    """
    places = random.Random(seed).sample(PLACES, len(PLACES))
    kills = planned(places, seed=10 * seed + int(level[1]), epochs=4)
    run(tmp_path / "killed", level, 4, kills, torchrun=seed == 0)
    check(undisturbed(level), tmp_path / "killed", len(places), epochs=4)
