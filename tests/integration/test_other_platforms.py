"""A platform without fork, POSIX signals and /proc, simulated by hiding them. Windows and macOS lack some of these."""

import subprocess
import sys
from pathlib import Path

import pytest

# The names are hidden after the import of torch and Lightning, which check for them when they are imported.
HIDDEN = """
import builtins, io, multiprocessing, os, signal, subprocess, sys, lightning.pytorch, torch.distributed
from lightning.pytorch.trainer.connectors import signal_connector
from torch.utils.data._utils import signal_handling

kept = {"SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV"}
for name in [each for each in dir(signal) if each.startswith("SIG") and each.isupper() and each not in kept]:
    if not name.startswith("SIG_"):
        delattr(signal, name)
signal.valid_signals = lambda: {getattr(signal, name) for name in kept}
signal_connector._IS_WINDOWS = signal_handling.IS_WINDOWS = True
for name in ("fork", "killpg", "register_at_fork", "sched_getaffinity", "setsid", "sysconf", "uname", "statvfs"):
    delattr(os, name)
subprocess.Popen.kill = subprocess.Popen.terminate
sys.modules.update(fcntl=None, resource=None)
real_open = builtins.open

def without_proc(path, *args, **kwargs):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(path)
    return real_open(path, *args, **kwargs)

builtins.open = io.open = without_proc
real_unlink = os.unlink

def unlink_what_is_closed(path, *args, **kwargs):
    for number in os.listdir("/proc/self/fd"):
        if os.path.realpath("/proc/self/fd/" + number) == os.path.abspath(path):
            raise PermissionError(13, "a process uses this file", path)
    real_unlink(path, *args, **kwargs)

os.unlink = unlink_what_is_closed
"""
PROGRAM = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from lightning_turbo import ApexAMP, Doctor, Prefetch
from lightning_turbo.data import PackedDataset, PrefetchLoader, cache_transforms, pack
import lightning_turbo.cli, lightning_turbo.tune

class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def fit(num_workers=0, **flags):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(accelerator="cpu", max_epochs=2, enable_checkpointing=False, **quiet, **flags)
    trainer.fit(Model(), DataLoader(Rows(), 4, shuffle=True, num_workers=num_workers))
    assert trainer.global_step == 8

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    fit(plugins=[ApexAMP("O1")])
    fit(plugins=[ApexAMP("O2")], strategy="turbo")
    fit(callbacks=[Prefetch(), Doctor()], num_workers=1)
    assert len(list(PrefetchLoader(Rows(), 4))) == 4
    pack(Rows(), "packed", num_workers=1)
    assert PackedDataset("packed")[3][1] == 1
    cache_transforms(Rows(), "cached", key="rows")
    print("all of it ran")
"""
TUNE = """
if __name__ == "__main__":
    from pathlib import Path

    from lightning_turbo.measure import Interrupt, Progress, describe_machine
    from lightning_turbo.tune.candidates import list_candidates
    from lightning_turbo.tune.promise import Stretch
    from lightning_turbo.tune.runner import ScriptRunner, TuneSettings

    assert describe_machine("cpu")["memory_bytes"] is None
    with Progress() as progress:
        table = {each.name: each for each in list_candidates(2)}
        runner = ScriptRunner(TuneSettings(program="train.py"), table, Interrupt(), progress, Path("scratch"))
        rows = runner.measure([(), ("fused",)], Stretch(steps=8, turns=4))
    assert [(row["status"], len(row["rounds"])) for row in rows.values()] == [("ok", 4)] * 2, rows
    print("all of it ran")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="hides features of Linux"),
]


def run(tmp_path, program):
    (tmp_path / "program.py").write_text(HIDDEN + program)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.strip().endswith("all of it ran"), done.stderr[-6000:]
    return done.stderr


def test_loading_precision_and_callbacks_run_without_posix_features(tmp_path):
    run(tmp_path, PROGRAM)


def test_tune_measures_candidates_one_after_another_without_posix_features(tmp_path):
    (tmp_path / "train.py").write_text(HIDDEN + PROGRAM.partition("if __name__")[0] + "fit()")
    run(tmp_path, TUNE)
