"""Profiles a training step of the suite ``overhead``, to tell where its time goes: ``--lean`` with the lean parts.

    python tests/release/step_profile.py [--lean] [--log N] [--steps N]

The profiler slows calls of Python functions most: read the shares, not the microseconds.
"""

import argparse
import cProfile
import itertools
import pstats
import warnings

import torch
from lightning.pytorch import Trainer
from torch import nn

from benchmarks.training import QUIET, Classifier
from benchmarks.workloads import sgd
from lightning_turbo import TurboStrategy

OWNERS = {
    "lightning_turbo/": "lightning_turbo",
    "torchmetrics/": "Lightning",
    "lightning": "Lightning",
    "torch": "torch",
}


def owner(file, name):
    path = file.rpartition("site-packages/")[2] if file != "~" else name
    return next((who for part, who in OWNERS.items() if part in path), "Python")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lean", action="store_true", help="with lean_step and lean_logging")
    parser.add_argument("--log", type=int, default=0, help="values logged in each step")
    parser.add_argument("--steps", type=int, default=2000)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    batches = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(8)]
    strategy = TurboStrategy(lean_step=asked.lean, lean_logging=asked.lean)
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=asked.steps, **QUIET)
    module = Classifier(net, lambda parameters: sgd(list(parameters)), asked.log)
    profile = cProfile.Profile()
    with profile:
        trainer.fit(module, itertools.cycle(batches))
    shares, rows = {}, []
    for (file, _, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items():
        who = owner(file, name)
        shares[who] = shares.get(who, 0.0) + own
        if calls >= asked.steps * 0.9 and who in ("Lightning", "lightning_turbo"):
            rows.append((whole, own, f"{file.rpartition('site-packages/')[2].rpartition('/')[2]}:{name}"))
    total = sum(shares.values())
    print("own time:", ", ".join(f"{who} {part / total:.0%}" for who, part in sorted(shares.items())))
    print("share of the step, own share, function")
    for whole, own, name in sorted(rows, reverse=True)[:40]:
        print(f"{whole / total:6.1%} {own / total:6.1%}  {name}")


if __name__ == "__main__":
    main()
