"""Two ranks: techniques keep them equal, stopped runs resume, accumulation and strategies are exact.

The function above each test runs in the ranks. Functions that run to their end share one start of the
ranks, because the start takes longer than the runs.
"""

import atexit
import contextlib
import itertools
import math
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, default_collate

from lightning_turbo import ApexAMP, EffectiveBatchSize, ExactAccumulation, PrefetchLoader, TurboDDPStrategy
from lightning_turbo._distributed import gather_for_checkpoint
from lightning_turbo.data.loading import prefetcher
from tests import registry, trainers
from tests.integration import resuming
from tests.integration.recording import gives
from tests.integration.resuming import ALL, assert_same, check_resumed
from tests.ranks import run_ranks
from tests.registry import BY_NAME
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

distributed = pytest.mark.distributed
RANK = int(os.environ.get("RANK", 0))
LEVELS = ("O0", "O1", "O2", "O3")
SAMPLES = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48))
FORTY = Subset(SAMPLES, range(40))


class Net(pl.LightningModule):
    """Records its samples."""

    def __init__(self, *more, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *more, nn.Linear(16, width))
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(batch[1].tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1] % 3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(model, data, ckpt=None, weights_only=True, **settings):
    """Train on both ranks and return the trainer."""
    trainer = trainers.quiet_trainer(devices=2, **settings)
    trainer.fit(model, data, ckpt_path=ckpt, **unpickling(weights_only if ckpt else None))
    return trainer


def run_jobs(folder, *jobs):
    """Call functions of this module in one rank, and save what they yield."""
    prefetcher.MIN_SECONDS = 0.0  # every prefetching loader gets a thread, although it is fast
    for job in jobs:
        for name, result in globals()[job](folder):
            torch.save(result, folder / f"{name}.{RANK}")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    jobs = ("techniques", "resume", "stopped", "accumulation", "places")
    run_ranks(run_jobs, folder, *jobs, "strategies", "own_orders", "lean")
    return folder


def load(folder, name):
    """Return what each rank saved under a name."""
    return [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in (0, 1)]


# Techniques


def techniques(folder, groups=(tuple(BY_NAME),)):
    """Train with groups of techniques, including all of them, at every level."""
    for names, level in itertools.product(groups, LEVELS):
        _, model = registry.run(pl, level, [BY_NAME[name] for name in names], devices=2)
        yield f"{'+'.join(names)}.{level}", {"losses": model.losses, "module": model.state_dict()}


def pairs(folder):
    return techniques(folder, list(itertools.combinations(BY_NAME, 2)))


def check_techniques(folder, names):
    ranks = load(folder, names)
    assert all(math.isfinite(loss) for rank in ranks for loss in rank["losses"]), names
    for key, value in ranks[0]["module"].items():
        if "running" not in key:  # each rank sees its own batches
            assert torch.equal(value, ranks[1]["module"][key]), (names, key)


@distributed
@pytest.mark.parametrize("level", LEVELS)
def test_all_techniques_together_keep_the_ranks_equal(level, ended):
    check_techniques(ended, f"{'+'.join(BY_NAME)}.{level}")


@pytest.mark.slow
@distributed
@pytest.mark.timeout(1000)
def test_every_pair_of_techniques_keeps_the_ranks_equal(tmp_path):
    run_ranks(run_jobs, tmp_path, "pairs", timeout=900)
    names = {path.name[:-2] for path in tmp_path.iterdir()}
    assert len(names) == len(LEVELS) * len(BY_NAME) * (len(BY_NAME) - 1) // 2
    for name in names:
        check_techniques(tmp_path, name)


# Stopped runs


def resume(folder, cases=("O1-adamw_fused-float16", "O2-sgd-float16")):
    """Train, and resume from three checkpoints."""
    for case in cases:
        yield f"resume.{case}", resuming.run_all(case, folder)


def resume_all(folder):
    return resume(folder, ALL)


@distributed
@pytest.mark.parametrize("case", ["O1-adamw_fused-float16", "O2-sgd-float16"])
def test_a_resumed_run_equals_an_uninterrupted_one(case, ended):
    ranks = load(ended, f"resume.{case}")
    for ends in ranks:
        check_resumed(case, ends)
    assert_same(ranks[0]["straight"]["updated"], ranks[1]["straight"]["updated"])


@pytest.mark.slow
@distributed
@pytest.mark.timeout(1000)
def test_a_resumed_run_equals_an_uninterrupted_one_at_every_level_with_every_optimizer(tmp_path):
    run_ranks(run_jobs, tmp_path, "resume_all", timeout=900)
    for case in ALL:
        for ends in load(tmp_path, f"resume.{case}"):
            check_resumed(case, ends)


class Stopping(Net):
    """Gets a signal together with the other rank after a step, or alone in the middle of an accumulation window."""

    def __init__(self, stop=None):
        super().__init__()
        self.stop = stop

    def training_step(self, batch, index):
        if self.stop == "alone" and index == 5:
            if RANK == 0:
                raise KeyError("the error of rank 0")
            while not (Path(self.trainer.default_root_dir) / "alone.ckpt").exists():
                time.sleep(0.05)
            os._exit(0)
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs, batch, index):
        if self.stop == "together" and index == 7:
            self.trainer._signal_connector.received_sigterm = True


def fit(folder, stop=None, ckpt=None):
    """Train two epochs of ten batches in windows of four. Every rank has its own order."""
    model = Stopping(stop)
    generator = torch.Generator().manual_seed(RANK + 10 * (ckpt is not None))
    trainer = train(
        model, PrefetchLoader(FORTY, batch_size=4, shuffle=True, generator=generator), ckpt, weights_only=False,
        strategy="turbo_ddp", max_epochs=2, default_root_dir=folder, enable_checkpointing=True,
        accumulate_grad_batches=4, use_distributed_sampler=False,
        plugins=[ApexAMP("O2", dtype=torch.bfloat16, loss_scale=8.0)],
        callbacks=[ExactAccumulation(), OnExceptionCheckpoint(folder, filename=str(stop))],
    )  # fmt: skip
    return {"module": model.state_dict(), "seen": model.seen, "steps": trainer.global_step}


def stopped(folder):
    """Stop both ranks by a signal, and resume."""
    yield "stopped.straight", fit(folder)
    with contextlib.suppress(SIGTERMException):
        fit(folder, "together")
        raise AssertionError("was not stopped")
    yield "stopped.again", fit(folder, ckpt=folder / "together.ckpt")


@distributed
def test_a_run_stopped_by_a_signal_and_resumed_equals_an_uninterrupted_one(ended):
    for straight, again in zip(load(ended, "stopped.straight"), load(ended, "stopped.again"), strict=True):
        assert straight["steps"] == again["steps"] == 6
        assert len(straight["seen"]) == 20
        assert again["seen"] == straight["seen"][8:]
        assert_same(straight["module"], again["module"])


def alone(folder):
    """End one rank by an error while the other waits in its step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(folder, "alone")
        except Exception as error:
            chain = [error]
            while chain[-1].__context__ is not None:
                chain.append(chain[-1].__context__)
            said = [str(warning.message) for warning in caught if "The checkpoint holds the" in str(warning.message)]
            torch.save({"errors": [repr(each) for each in chain], "said": said}, folder / "alone")
    os._exit(0)  # the process group is broken


def after_alone(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(folder, ckpt=folder / "alone.ckpt")
    said = [str(warning.message) for warning in caught if "window" in str(warning.message)]
    yield "after_alone", {**result, "said": said}


@pytest.mark.slow
@distributed
def test_a_rank_writes_its_checkpoint_after_another_rank_failed(tmp_path):
    run_ranks(run_jobs, tmp_path, "alone")
    alone = torch.load(tmp_path / "alone")
    assert any("the error of rank 0" in error for error in alone["errors"])
    assert any("random states and loaders' states of rank 0 only" in text for text in alone["said"])
    run_ranks(run_jobs, tmp_path, "after_alone")
    zero, one = load(tmp_path, "after_alone")
    assert zero["steps"] == one["steps"] == 6
    assert (bool(zero["said"]), bool(one["said"])) == (True, False)


def places(folder):
    """Gather between batches, during an exception on one rank, and during a SIGTERMException on both."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    result = {"ordinary": gather_for_checkpoint(RANK, "number"), "error": None}
    result["all"] = gather_for_checkpoint(RANK, "number", to_all=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            raise SIGTERMException if RANK else KeyError
        except KeyError:
            result["error"] = gather_for_checkpoint(RANK, "number")
        except SIGTERMException:
            pass
        try:
            raise SIGTERMException
        except SIGTERMException:
            result["sigterm"] = gather_for_checkpoint(RANK, "number")
    yield "places", {**result, "said": [str(warning.message) for warning in caught]}


@distributed
def test_gather_for_checkpoint_does_not_wait_for_other_ranks_after_an_error(ended):
    zero, one = load(ended, "places")
    assert (zero["ordinary"], one["ordinary"]) == ([0, 1], [1, 1])  # only rank 0 writes
    assert zero["all"] == one["all"] == [0, 1]
    assert (zero["error"], one["error"]) == ([0], None)  # only rank 0 asks, which would hang
    assert zero["sigterm"] == [0, 1]
    assert len(zero["said"]) == 1
    assert "the number of rank 0 only, because a KeyError was raised" in zero["said"][0]


# ExactAccumulation


class Mean(Net):
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()


def uneven(samples):
    """Keep 3 samples if the first index is even and 1 if it is odd, so that the ranks have different weights."""
    return whole(samples[: 3 if samples[0][1] % 2 == 0 else 1])


def whole(samples):
    return [torch.stack([x for x, _ in samples])]


def accumulation(folder):
    """ExactAccumulation with and without weights: 5 batches per rank in windows of 3 and 2."""
    for weighted in (False, True):
        model = Mean()
        sampler = DistributedSampler(FORTY, 2, RANK, shuffle=False)
        train(
            model, DataLoader(FORTY, 4, collate_fn=uneven if weighted else whole, sampler=sampler),
            strategy="ddp", use_distributed_sampler=False, max_epochs=2, accumulate_grad_batches=3,
            gradient_clip_val=0.5, callbacks=[ExactAccumulation((lambda batch: len(batch[0])) if weighted else None)],
            plugins=[ApexAMP("O0", loss_scale=256.0)] if weighted else None,
        )  # fmt: skip
        yield f"accumulation.{weighted}", {"module": model.state_dict()}


@distributed
@pytest.mark.parametrize("weighted", [False, True])
def test_exact_accumulation_on_two_ranks_equals_one_joint_batch(weighted, ended):
    model = Mean()
    optimizer = model.configure_optimizers()
    collate = uneven if weighted else whole
    batches = [
        [collate([FORTY[i] for i in range(rank + 2 * start, rank + 2 * start + 8, 2)])[0] for start in range(0, 20, 4)]
        for rank in (0, 1)  # as DistributedSampler divides them
    ]
    for start in (0, 3, 0, 3):
        optimizer.zero_grad()
        window = torch.cat([x for own in batches for x in own[start : start + 3]])
        model.training_step([window], 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for rank in load(ended, f"accumulation.{weighted}"):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(rank["module"][name], value, rtol=1e-6, atol=1e-6)


# Strategies


class Dropping(Net):
    """Draws random numbers, and records the arguments of DDP."""

    def __init__(self):
        super().__init__(nn.Dropout(0.2))

    def on_train_end(self):
        ddp = self.trainer.model
        self.ddp = {name: getattr(ddp, name) for name in ("static_graph", "gradient_as_bucket_view")}
        self.ddp["holds_gradients"] = any(p.grad is not None for p in self.parameters())


LOADED_AHEAD = set()


def note_thread(samples):
    LOADED_AHEAD.add(threading.current_thread() is not threading.main_thread())
    return default_collate(samples)


STRATEGIES = {
    "stock": lambda: "ddp",
    "turbo": lambda: "turbo_ddp",
    "stock-1": lambda: "ddp",
    "static-1": lambda: TurboDDPStrategy(static_graph=True, gradient_as_bucket_view=False),
    "sized": lambda: "turbo_ddp",
    "prefetched": lambda: "ddp",
    "compiled": lambda: TurboDDPStrategy(compile={"backend": "eager"}),
    "turbo-O2": lambda: "turbo_ddp",
    "stock-O2": lambda: "ddp",
}


def strategies(folder):
    """The turbo strategy with its parts, and Lightning's own."""
    for name, strategy in STRATEGIES.items():
        pl.seed_everything(0, verbose=False)
        LOADED_AHEAD.clear()
        window = 1 if name.endswith("1") or name == "sized" else 2
        model, loader = Dropping(), DataLoader(SAMPLES, batch_size=4, shuffle=True, collate_fn=note_thread)
        trainer = train(
            model, gives(loader) if name == "prefetched" else loader,
            strategy=strategy(), max_epochs=2, accumulate_grad_batches=window,
            plugins=[ApexAMP("O2", dtype=torch.bfloat16)] if name.endswith("O2") else None,
            callbacks=[EffectiveBatchSize(16, batch_size=4)] if name == "sized" else None,  # 4 samples x 2 ranks x 2
        )  # fmt: skip
        result = {"module": model.state_dict(), "seen": model.seen, "ddp": model.ddp, "steps": trainer.global_step}
        yield f"strategies.{name}", {**result, "loaded_ahead": any(LOADED_AHEAD)}


def own_orders(folder):
    """A run whose ranks have their own orders, and runs resumed from its checkpoints in and at the end of an epoch."""
    for step in (None, 8, 12):
        model = Dropping()
        saves = ModelCheckpoint(folder, filename="own-{step}", every_n_train_steps=4, save_top_k=-1)
        torch.manual_seed(RANK + 10 * (step or 0))  # dropout differs from rank to rank
        generator = torch.Generator().manual_seed(RANK + 10 * (step or 0))
        loader = PrefetchLoader(SAMPLES, batch_size=4, shuffle=True, generator=generator)
        train(
            model, loader, step and folder / f"own-step={step}.ckpt", strategy="turbo_ddp", max_epochs=2,
            enable_checkpointing=True, use_distributed_sampler=False, callbacks=[saves],
        )  # fmt: skip
        yield f"own_orders.{step}", {"module": model.state_dict(), "seen": model.seen}


@distributed
def test_turbo_ddp_equals_ddp(ended):
    runs = {name: load(ended, f"strategies.{name}") for name in STRATEGIES}
    for name, (zero, one) in runs.items():
        assert_same(zero["module"], one["module"])
        seen = [zero["seen"][k : k + 6] + one["seen"][k : k + 6] for k in (0, 6)]
        epochs = [sorted(itertools.chain.from_iterable(batches)) for batches in seen]
        assert epochs == [list(range(48))] * 2, name  # all ranks together use each sample once per epoch
        assert seen[0] != seen[1], name
        # Its dropout draws random numbers on the CPU, beside which no thread loads.
        assert not zero["loaded_ahead"], name
        assert not one["loaded_ahead"], name
    for turbo, stock, tolerance in (
        ("turbo", "stock", 0.0), ("static-1", "stock-1", 0.0), ("turbo-O2", "stock-O2", 0.0),
        ("sized", "stock", 0.0), ("prefetched", "stock", 0.0), ("compiled", "stock", 1e-6),
    ):  # fmt: skip
        ours, theirs = runs[turbo][0], runs[stock][0]
        assert ours["steps"] == theirs["steps"]
        for name, value in ours["module"].items():
            torch.testing.assert_close(value, theirs["module"][name], rtol=0, atol=tolerance, msg=turbo)
    for name, static, view, holds in (  # they are released before the next step, not after the last one
        ("stock", False, False, True), ("turbo", False, True, True), ("static-1", True, False, True),
    ):  # fmt: skip
        made = {"static_graph": static, "gradient_as_bucket_view": view, "holds_gradients": holds}
        assert runs[name][0]["ddp"] == made, name


@distributed
def test_turbo_ddp_resumes_from_checkpoints(ended):
    for step in (8, 12):  # in and at the end of an epoch
        straight, again = load(ended, "own_orders.None"), load(ended, f"own_orders.{step}")
        assert [len(rank["seen"]) for rank in straight] == [24, 24]
        assert [rank["seen"] for rank in again] == [rank["seen"][step:] for rank in straight]
        assert_same([rank["module"] for rank in again], [rank["module"] for rank in straight])


class Logging(Net):
    """Logs a value. Rank 1 gets SIGTERM in a batch."""

    def __init__(self, ends_in=None):
        super().__init__()
        self.ends_in = ends_in

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if len(self.seen) == self.ends_in and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.log("loss", loss, sync_dist=True, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class Fetches(TorchDispatchMode):
    """Counts the values that the host fetches."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def lean(folder):
    """Train with and without the lean parts, and with a signal that ends the run."""
    if not KNOWS_WEIGHTS_ONLY:
        return
    stock, turbo = (lambda: "ddp"), TurboDDPStrategy
    for name, strategy, ends_in in (("stock", stock, None), ("lean", turbo, None), ("killed", turbo, 2)):
        model, metrics, counting = Logging(ends_in), None, Fetches()  # None where the run was ended
        with contextlib.suppress(SystemExit), counting:
            data = DataLoader(SAMPLES, batch_size=2)
            trainer = train(model, data, strategy=strategy(), max_epochs=2, default_root_dir=folder)
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        yield f"lean.{name}", {
            "module": model.state_dict(), "metrics": metrics, "batches": len(model.seen), "fetched": counting.count,
        }  # fmt: skip


@distributed
@pytest.mark.skipif(not KNOWS_WEIGHTS_ONLY, reason="the lean parts are for Lightning 2.6")
def test_the_lean_loop_on_ranks_computes_the_same_and_stops_after_the_same_batch(ended):
    for stock, lean, killed in zip(*(load(ended, f"lean.{name}") for name in ("stock", "lean", "killed")), strict=True):
        assert_same(stock["module"], lean["module"])
        assert stock["metrics"] == lean["metrics"]
        # Rank 1 gets the signal in batch 2 and sends it to rank 0 at the end of it; rank 0 receives it one batch later.
        assert (killed["batches"], killed["metrics"]) == (3, None)
        # Lightning's broadcast fetches a value in each of 24 batches, and so does the progress bar.
        assert lean["fetched"] < 24 <= stock["fetched"] - lean["fetched"]


class Spawned(Logging):
    def on_train_batch_start(self, batch, index):
        self.log("steps", float(self.trainer.global_step + 1))

    def on_fit_end(self):
        # A thread of gloo may still hold the last tensor, see tests/ranks.py.
        atexit.register(torch.distributed.destroy_process_group)


def spawned(folder):
    """Train with ranks that the Trainer spawns. This runs in one process."""
    for name, strategy in (("stock", "ddp_spawn"), ("turbo", TurboDDPStrategy(start_method="spawn"))):
        model = Spawned()
        trainer = train(model, DataLoader(SAMPLES, batch_size=8), strategy=strategy, max_epochs=2)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        yield f"spawned.{name}", {"module": model.state_dict(), "metrics": metrics}


@pytest.mark.slow
@distributed
def test_two_spawned_ranks_equal_ddp_spawn(tmp_path):
    run_ranks(run_jobs, tmp_path, "spawned", ranks=1)
    stock, turbo = (torch.load(tmp_path / f"spawned.{name}.0", weights_only=True) for name in ("stock", "turbo"))
    assert_same(stock, turbo)
    assert stock["metrics"]["steps"] == 6
    assert not torch.equal(stock["module"]["net.0.weight"], Net().net[0].weight)
