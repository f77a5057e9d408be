"""Check that the sources that the lean loop follows are known in each version of Lightning in the table.

    python tests/release/lean_sources.py --folder DIR [VERSION ...]

Downloads each version of ``LEAN_VERSIONS``, or the given ones, to DIR, without its requirements, which have to be
installed. If the sources of a version differ, compare them with the lean loop and adapt it, then add the digest to
``READ`` and the version to ``LEAN_VERSIONS``.
"""

import argparse
import hashlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

ROOT = Path(__file__).resolve().parents[2]
# Sources that the lean loop follows, or whose calls it leaves out because they do nothing.
FOLLOWED = [
    call._call_callback_hooks, call._call_lightning_module_hook, call._call_strategy_hook,
    _TrainingEpochLoop.advance, _TrainingEpochLoop._build_kwargs, _AutomaticOptimization, Closure,
    pl.LightningModule._call_batch_hook, pl.LightningModule._on_before_batch_transfer,
    pl.LightningModule._apply_batch_transfer_handler, Strategy.batch_to_device,
    DataHooks.on_before_batch_transfer, DataHooks.transfer_batch_to_device, DataHooks.on_after_batch_transfer,
    pl.LightningModule.optimizer_zero_grad, pl.LightningModule.configure_gradient_clipping,
    pl.LightningModule.clip_gradients,
    Strategy.backward, Strategy.optimizer_step,
    Precision.pre_backward, Precision.post_backward, Precision.optimizer_step, Precision._wrap_closure,
    Precision._after_closure, Precision._clip_gradients, Precision.clip_gradients,
    MixedPrecision.pre_backward, MixedPrecision.optimizer_step, MixedPrecision.clip_gradients,
    _ResultCollection.log, _ResultCollection.update_metrics, _ResultCollection.metrics, _ResultMetric.to,
    _LoggerConnector.on_batch_end, _LoggerConnector.metrics.fget, _LoggerConnector.progress_bar_metrics.fget,
    _LoggerConnector.update_train_step_metrics, _LoggerConnector.should_update_logs.fget, _LoggerConnector.log_metrics,
]  # fmt: skip
# Digests of compared sources; all versions of the table have the same.
READ = ("c01b0acfe17f75f2",)


def digest():
    """Return the digest of the sources of the imported Lightning."""
    text = "".join(inspect.getsource(part) for part in FOLLOWED).replace("pytorch_lightning", "lightning.pytorch")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the downloads")
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    args = parser.parse_args()
    from lightning_turbo._trainer import LEAN_VERSIONS

    other = []
    for version in args.versions or LEAN_VERSIONS:
        target = args.folder.resolve() / version
        if not target.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
            subprocess.run([*pip, f"lightning=={version}"], check=True)
        code = "import lean_sources as s; print(s.pl.__version__, s.digest())"
        path = os.pathsep.join(map(str, (target, Path(__file__).parent, ROOT)))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True,
        )  # fmt: skip
        found = done.stdout.split()
        print(*found, "read" if found[1] in READ else "not read yet")
        if found[0] != version or found[1] not in READ:
            other.append(version)
    sys.exit(1 if other else 0)


if __name__ == "__main__":
    main()
