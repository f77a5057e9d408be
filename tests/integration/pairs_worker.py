"""Techniques together on one rank of two; run by test_together.py.

``python pairs_worker.py FOLDER pairs|all``
"""

import itertools
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_turbo.data import prefetcher
from tests.registry import BY_NAME, run


def main():
    torch.set_num_threads(1)
    prefetcher.WORTH = 0.0  # every prefetching loader gets a thread, fast as it is
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    groups = [tuple(BY_NAME)] if sys.argv[2] == "all" else list(itertools.combinations(BY_NAME, 2))
    for names in groups:
        techniques = [BY_NAME[name] for name in names]
        for level in ("O0", "O1", "O2", "O3"):
            trainer, model = run(pl, level, techniques, devices=2)
            name = f"{'+'.join(names)}.{level}.{trainer.global_rank}"
            torch.save({"losses": model.losses, "module": model.state_dict()}, folder / name)


if __name__ == "__main__":
    main()
