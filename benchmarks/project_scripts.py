"""``python -m benchmarks.project_scripts NAME``: what ``benchmarks.projects`` runs where a project is not one command.

Each function calls the project as its documentation does.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["chemprop", "gluonts", "l7irish", "main", "scvi", "stallion", "torchgeo"]


def _of(name: str) -> Any:
    return importlib.import_module(name)


def stallion() -> None:
    """Run pytorch-forecasting's ``examples/stallion.py``, with the fit that it has in a comment for its search."""
    loggers = _of("lightning.pytorch.loggers")
    # The script makes one without its folder, which Lightning 2 requires.
    loggers.TensorBoardLogger = functools.partial(loggers.TensorBoardLogger, "lightning_logs")
    _of("pytorch_forecasting.data.examples").DATA_PATH = Path("examples/data").absolute()
    _of("pytorch_forecasting.models.temporal_fusion_transformer.tuning").optimize_hyperparameters = _fit
    runpy.run_path("examples/stallion.py", run_name="__main__")


def _fit(train: Any, validation: Any, **settings: Any) -> NoReturn:
    """Fit the network of the script with its Trainer, and end the script: what follows saves the search."""
    script = sys._getframe(1).f_globals
    script["trainer"].fit(script["tft"], train_dataloaders=train, val_dataloaders=validation)
    sys.exit()


def chemprop() -> None:
    """Run chemprop's command line, with the arguments of this process."""
    _of("chemprop.cli.main").main()


def scvi() -> None:
    """Train scvi-tools' ``SCVI`` on its synthetic data: 4,000 cells with 500 genes."""
    _of("scvi").settings.seed = 0  # without it each run splits the data otherwise
    data = _of("scvi.data").synthetic_iid(batch_size=2_000, n_genes=500)
    model = _of("scvi.model").SCVI
    model.setup_anndata(data, batch_key="batch", labels_key="labels")
    model(data).train(max_epochs=10, accelerator="cpu", check_val_every_n_epoch=1)


def l7irish() -> None:
    """Make the scenes of torchgeo's ``L7Irish`` with its own script, of 384 pixels in place of 36."""
    folder = Path("tests/data/l7irish")
    spec = importlib.util.spec_from_file_location("data", folder / "data.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.SIZE = 384
    script.create_directory(str(folder), script.filenames)


def torchgeo() -> None:
    """Run torchgeo's command line, with the arguments of this process."""
    _of("torchgeo.main").main()


def gluonts() -> None:
    """Train GluonTS' ``SimpleFeedForwardEstimator`` on 100 of its artificial series, in the precision of a network."""
    data = _of("gluonts.dataset.artificial").ComplexSeasonalTimeSeries(num_series=100)
    meta, listed = data.metadata, _of("gluonts.dataset.common").ListDataset
    train, validation = (listed(list(part), freq=meta.freq) for part in (data.train, data.test))
    estimator = _of("gluonts.torch").SimpleFeedForwardEstimator(
        prediction_length=meta.prediction_length, trainer_kwargs={"max_epochs": 20, "accelerator": "cpu"}
    )
    estimator.train(train, validation)


PROGRAMS = (chemprop, gluonts, l7irish, scvi, stallion, torchgeo)


def main() -> None:
    """Run the function that the command line names, with the arguments behind its name."""
    name = sys.argv.pop(1)
    next(program for program in PROGRAMS if program.__name__ == name)()


if __name__ == "__main__":
    main()
