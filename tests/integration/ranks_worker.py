"""Jobs of two ranks, one after the other in one process each, because starting one costs more; run by test_ranks.py.

``ranks_worker.py FOLDER JOB...``
"""

import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, default_collate

from lightning_turbo import (
    ApexAMP,
    EffectiveBatchSize,
    ExactAccumulation,
    PrefetchLoader,
    TurboDDPStrategy,
)
from lightning_turbo._distributed import gather_for_checkpoint
from lightning_turbo.data.loading import thread_policy
from tests import registry, trainers
from tests.integration import resuming
from tests.integration.noting import gives
from tests.versions import KNOWS_WEIGHTS_ONLY, unpickling

RANK = int(os.environ.get("RANK", 0))
LEVELS = ("O0", "O1", "O2", "O3")


def train(model, data, ckpt=None, weights_only=True, **settings):
    """Train on both ranks and return the trainer."""
    trainer = trainers.quiet_trainer(devices=2, **settings)
    trainer.fit(model, data, ckpt_path=ckpt, **unpickling(weights_only if ckpt else None))
    return trainer


def techniques(folder, groups=(tuple(registry.BY_NAME),)):
    """Trains with groups of techniques, of which all is one, at every level."""
    for names, level in itertools.product(groups, LEVELS):
        _, model = registry.run(pl, level, [registry.BY_NAME[name] for name in names], devices=2)
        yield f"{'+'.join(names)}.{level}", {"losses": model.losses, "module": model.state_dict()}


def pairs(folder):
    return techniques(folder, list(itertools.combinations(registry.BY_NAME, 2)))


SAMPLES = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48))
FORTY = Subset(SAMPLES, range(40))


class Net(pl.LightningModule):
    """Notes its samples."""

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


def resume(folder, cases=("O1-adamw_fused-float16", "O2-sgd-float16")):
    """Trains, and goes on from three checkpoints."""
    for case in cases:
        yield f"resume.{case}", resuming.run_all(case, folder)


def resume_all(folder):
    return resume(folder, resuming.ALL)


class Stopping(Net):
    """Is told to stop with the other rank after a step, or alone in the middle of an accumulation window."""

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
    """Trains two epochs of ten batches in windows of four; every rank has its own order."""
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
    """Both ranks are told to stop, and go on."""
    yield "stopped.straight", fit(folder)
    with contextlib.suppress(SIGTERMException):
        fit(folder, "together")
        raise AssertionError("was not told to stop")
    yield "stopped.again", fit(folder, ckpt=folder / "together.ckpt")


def alone(folder):
    """One rank ends by an error while the other waits in its step."""
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
    os._exit(0)  # the group is broken


def after_alone(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(folder, ckpt=folder / "alone.ckpt")
    said = [str(warning.message) for warning in caught if "window" in str(warning.message)]
    yield "after_alone", {**result, "said": said}


def places(folder):
    """Gathers between batches, while an error is under way on one rank, and while both are told to end."""
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
            result["told"] = gather_for_checkpoint(RANK, "number")
    yield "places", {**result, "said": [str(warning.message) for warning in caught]}


class Mean(Net):
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()


def uneven(samples):
    """Keeps 3 samples of an even first index, 1 of an odd one: ranks get different weights."""
    return whole(samples[: 3 if samples[0][1] % 2 == 0 else 1])


def whole(samples):
    return [torch.stack([x for x, _ in samples])]


def accumulation(folder):
    """ExactAccumulation with and without weights: 5 batches a rank in windows of 3 and 2."""
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


class Dropping(Net):
    """Draws random numbers, and notes how DDP was made."""

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
    """Each rank's own order: a run, and runs from its checkpoints in and at the end of an epoch."""
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


class Logging(Net):
    """Logs a value; rank 1 is told to end in a batch of its run."""

    def __init__(self, ends_in=None):
        super().__init__()
        self.ends_in = ends_in

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if len(self.seen) == self.ends_in and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.log("loss", loss, sync_dist=True, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class Spawned(Logging):
    def on_train_batch_start(self, batch, index):
        self.log("steps", float(self.trainer.global_step + 1))

    def on_fit_end(self):
        # A thread of gloo may hold the last tensor still, see tests/ranks.py. Lightning has more to say until the end.
        atexit.register(torch.distributed.destroy_process_group)


def spawned(folder):
    """Ranks that the Trainer spawns itself; run in one process."""
    for name, strategy in (("stock", "ddp_spawn"), ("turbo", TurboDDPStrategy(start_method="spawn"))):
        model = Spawned()
        trainer = train(model, DataLoader(SAMPLES, batch_size=8), strategy=strategy, max_epochs=2)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        yield f"spawned.{name}", {"module": model.state_dict(), "metrics": metrics}


class Fetches(TorchDispatchMode):
    """Counts the values that the host fetches."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def lean(folder):
    """With and without the lean parts, and told to end."""
    if not KNOWS_WEIGHTS_ONLY:
        return
    stock, turbo = (lambda: "ddp"), TurboDDPStrategy
    for name, strategy, ends_in in (("stock", stock, None), ("lean", turbo, None), ("killed", turbo, 2)):
        model, metrics, counting = Logging(ends_in), None, Fetches()  # None where the run was ended
        with contextlib.suppress(SystemExit), counting:
            trainer = train(model, DataLoader(SAMPLES, batch_size=2), strategy=strategy(), max_epochs=2)
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        yield f"lean.{name}", {
            "module": model.state_dict(), "metrics": metrics, "batches": len(model.seen), "fetched": counting.count,
        }  # fmt: skip


def main():
    torch.set_num_threads(1)
    thread_policy.MIN_BATCH_SECONDS = 0.0  # every prefetching loader gets a thread, fast as it is
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    for job in sys.argv[2:]:
        for name, result in globals()[job](folder):
            torch.save(result, folder / f"{name}.{RANK}")


if __name__ == "__main__":
    main()
