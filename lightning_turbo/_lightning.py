"""The only module that imports Lightning: it chooses between ``lightning.pytorch`` and ``pytorch_lightning``.

These are two copies of the same code, and the Trainer of one refuses the objects of the other. All other modules take
Lightning's classes from here, so that they come from the copy that the program uses. Only this module, ``_trainer``,
``strategies.lean_loop``, ``callbacks.exact_resume`` and ``callbacks.preemption`` use private parts of Lightning.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_turbo.errors import LightningMismatchError

# ruff: noqa: F401
# Lightning's names. ``__getattr__`` reads this list and imports them from the bound copy, each on first use.
if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, move_data_to_device
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn as auto_add_worker_init_fn
    from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, ModelCheckpoint
    from lightning.pytorch.core.hooks import DataHooks
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher as DataLoaderIterDataFetcher
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
    from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior as block_parallel_sync_behavior
    from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
        _LoggerConnector as LoggerConnector,
    )
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
    from lightning.pytorch.tuner.tuning import Tuner
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.types import LRSchedulerConfig
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
    from torchmetrics import Metric

__all__ = [
    "bind_lightning",
    "bound_name",
    "check_binding",
    "names_of_lightning",
    "register_strategies",
    "repr_of_precision",
    "repr_with_copy",
    "when_lightning_is_imported",
]

NAMES = ("lightning.pytorch", "pytorch_lightning")
# Imports lightning.pytorch wherever it is installed, whatever the program uses.
_OF_RAY = "ray.train.lightning._lightning_utils"
VARIABLE = "LIGHTNING_TURBO_LIGHTNING"

_bound: str | None = None
_reason = ""
# Whether the bound copy is a guess: the program had imported neither copy, but perhaps Ray, and nobody had named one.
_guessed = False


def _loaded() -> list[str]:
    """Return the import names under which Lightning is loaded, in import order; last the one that only Ray imported."""
    loaded = [name for name in sys.modules if name in NAMES]
    return sorted(loaded, key=_is_of_ray)


def _is_of_ray(name: str) -> bool:
    """Return whether Ray imported a copy of Lightning before the program did."""
    imported = [each for each in sys.modules if each in (name, _OF_RAY)]
    return name == NAMES[0] and imported == [_OF_RAY, name]


def bound_name() -> str:
    """Return the import name of Lightning that the adapters use; the first call binds it.

    The first of these decides: ``bind_lightning``, the environment variable ``LIGHTNING_TURBO_LIGHTNING``, the name
    that the program imported first, ``lightning.pytorch`` if it is installed, ``pytorch_lightning``. What Ray imports
    is not the program's choice.
    """
    global _bound, _reason, _guessed
    # Bound once, because classes derive from what it returns. The program's choice comes before what is installed.
    if _bound is None:
        if os.environ.get(VARIABLE):
            _bound, _reason = _checked(os.environ[VARIABLE]), f"the environment variable {VARIABLE} says so"
        elif _loaded():
            _bound, _guessed = _loaded()[0], _is_of_ray(_loaded()[0])
            _reason = "Ray imported it" if _guessed else "the program imported it first"
        elif importlib.util.find_spec("lightning") is not None:
            _bound, _reason, _guessed = NAMES[0], "no Lightning was imported before it", True
        else:
            _bound, _reason = NAMES[1], "it is the only one installed"
    return _bound


def bind_lightning(name: str) -> None:
    """Bind the adapters to one of Lightning's two import names. Call it before using any of them.

    Args:
        name: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.

    Raises:
        ValueError: If ``name`` is neither.
        LightningMismatchError: If the adapters are already bound to the other name.
    """
    global _bound, _reason
    _checked(name)
    if _bound not in (None, name):
        raise LightningMismatchError(
            f"bind_lightning({name!r}): lightning_turbo is already bound to {_bound}, because {_reason}. "
            "Call bind_lightning before the first use of any name of lightning_turbo."
        )
    _bound, _reason = name, "bind_lightning was called"


def _checked(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"expected {NAMES[0]!r} or {NAMES[1]!r}, got {name!r}.")
    return name


def check_binding(used_by: str) -> None:
    """Raise an error if the program's Trainer would refuse an object of this package.

    Constructors call it. A binding is wrong if it was a guess and the program has imported the other copy since.

    Args:
        used_by: Name of the object's class, for the message.

    Raises:
        LightningMismatchError: If the program uses the other import name.
    """
    bound = bound_name()
    other = NAMES[1 - NAMES.index(bound)]
    if _guessed and other in sys.modules:
        raise LightningMismatchError(_mismatch(used_by, other))


@functools.cache
def names_of_lightning() -> dict[str, tuple[str, str]]:
    """Return name in this module -> module of ``lightning.pytorch`` and name there."""
    (block,) = (each for each in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(each, ast.If))
    imports: Any = block.body
    return {alias.asname or alias.name: (each.module, alias.name) for each in imports for alias in each.names}


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in names_of_lightning():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = names_of_lightning()[name]
    if bound_name() == NAMES[1]:
        module = module.replace("lightning.pytorch", NAMES[1]).replace("lightning.fabric", "lightning_fabric")
    # Cached, so that the next lookup does not call this function.
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


class _WhenImported:
    """Calls a function when Lightning is imported, once for each of its names.

    ``Trainer(strategy="turbo")`` must work whichever import comes first. Importing Lightning here would choose a copy
    on behalf of the program, or of the script that ``tune`` or the Doctor runs, and would cost a plain torch loop two
    seconds. As a finder on ``sys.meta_path`` this object hears of each import and finds nothing.
    """

    def __init__(self, callback: Callable[[str], None]) -> None:
        self.callback = callback

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        # Lightning imports this part of itself last. A mere look for Lightning, as by programs that look for one copy
        # and import the other, does not get here.
        copy = fullname.removesuffix("._graveyard")
        if copy != fullname and copy in NAMES:
            self.callback(copy)


def when_lightning_is_imported(callback: Callable[[str], None]) -> None:
    """Call ``callback`` with each name under which Lightning is imported, now or when the program imports it."""
    for name in _loaded():
        callback(name)
    sys.meta_path.insert(0, _WhenImported(callback))


def register_strategies(copy: str, strategies: dict[str, Callable[..., Any]]) -> None:
    """Register names for ``Trainer(strategy=...)`` with one copy of Lightning. Repeated calls have no further effect.

    If the adapters are not bound yet, they are bound to the first copy whose Trainer asks for one of the names.

    Args:
        copy: The import name of Lightning.
        strategies: Name -> function that returns the strategy.
    """
    registry = importlib.import_module(f"{copy}.strategies").StrategyRegistry
    for name, make in strategies.items():
        registry.register(name, functools.partial(_make_for, copy, name, make), "lightning_turbo", override=True)


def _make_for(copy: str, name: str, make: Callable[..., Any], **settings: Any) -> Any:
    """Make a strategy for the Trainer of one copy of Lightning."""
    global _bound, _reason
    if _bound is None and not os.environ.get(VARIABLE):
        _bound, _reason = copy, f"its Trainer was the first to ask for strategy={name!r}"
    if bound_name() != copy:
        raise LightningMismatchError(_mismatch(f"strategy={name!r}", copy))
    return make(**settings)


def _mismatch(what: str, other: str) -> str:
    return (
        f"{what} is built on {bound_name()}, because {_reason}, but this program uses {other}, another copy "
        f"of the same code, whose Trainer refuses it. Import {other} before lightning_turbo and no other copy, or set "
        f"the environment variable {VARIABLE}={other}, or call lightning_turbo.bind_lightning({other!r}) first."
    )


def repr_with_copy(self: Any) -> str:
    """A ``__repr__`` that says what to do if a program has both copies of Lightning.

    A Trainer shows it when it refuses an object, and knows of no copy but its own.
    """
    name = type(self).__name__
    other = NAMES[1 - NAMES.index(bound_name())]
    return f"<{_mismatch(name, other)}>" if other in sys.modules else f"<{name} of {bound_name()}>"


def repr_of_precision(self: Any) -> str:
    """A ``__repr__`` that says what to do; a Trainer shows it when a plugin and ``precision`` conflict."""
    remedy = "it sets the precision: leave precision= out; in a further YAML file write precision: null"
    return f"{repr_with_copy(self)[:-1]}; {remedy}>"
