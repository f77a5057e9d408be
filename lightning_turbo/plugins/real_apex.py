"""``ApexAMP(..., backend="apex")``: an installed NVIDIA apex behind the same plugin."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo._checks import check_choice
from lightning_turbo._lightning import MisconfigurationException, Precision, check_binding, loaded_checkpoint
from lightning_turbo.amp.convert import find_scaler_state
from lightning_turbo.amp.levels import resolve
from lightning_turbo.errors import AmpUsageError, MissingExtraError

__all__ = ["RealApexAMP", "import_apex_amp", "is_native", "take_over"]

_OVERRIDES = ("cast_model_type", "keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs")
_LIMITS = ("min_loss_scale", "max_loss_scale", "num_losses")
_ADVICE = (
    "NVIDIA removed it after tag 25.05, and what `pip install apex` brings is another project. Build NVIDIA's apex at "
    "tag 25.05 or older from https://github.com/NVIDIA/apex, or leave backend out: the native backend needs no apex."
)


def import_apex_amp() -> Any:
    """Return the module ``apex.amp`` of NVIDIA's apex.

    Raises:
        MissingExtraError: If no apex is installed, or one without ``amp``.
    """
    try:
        amp = importlib.import_module("apex.amp")
        amp.initialize  # noqa: B018  # absent from a namespace package of that name
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(f"backend='apex' needs apex.amp of NVIDIA's apex: {error}. {_ADVICE}") from error
    return amp


class RealApexAMP(Precision):
    """What ``ApexAMP(..., backend="apex")`` makes: apex itself does the casts, masters and scaling.

    The scale is settled once per backward pass, as in apex, and apex's limits hold: one set-up in a process, no
    bfloat16, masters rounded to half at the start and not in checkpoints, casts at the calls of the LightningModule
    itself (``self(x)``) only, patched functions of torch under O1 to the end of the process.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        **settings: The arguments of ``ApexAMP``. Those that apex does not have are refused if given.
    """

    # Lightning files a plugin's state under this name; so a checkpoint loads under either backend.
    __qualname__ = "ApexAMP"

    def __init__(self, opt_level: str = "O1", **settings: Any) -> None:
        super().__init__()
        check_binding("ApexAMP")
        self.opt_level = opt_level
        self._amp = import_apex_amp()
        if settings.get("dtype") is torch.float16:
            del settings["dtype"]  # apex has no other
        for name in settings.keys() - {*_OVERRIDES, *_LIMITS}:
            raise AmpUsageError(
                f"ApexAMP(backend='apex'): expected arguments that apex has, {', '.join((*_OVERRIDES, *_LIMITS))}, got "
                f"{name}={settings[name]!r}. Leave it out, or take the native backend."
            )
        resolve(opt_level, dtype=torch.float16, **{n: settings[n] for n in _OVERRIDES if n in settings})
        self._settings = settings
        self._optimizers: list[Optimizer] = []

    @property
    def precision(self) -> str:  # type: ignore[override]  # Lightning's is a class attribute
        """Lightning's own name for the nearest of its precisions."""
        return {"O0": "32-true", "O1": "16-mixed"}.get(self.opt_level, "16-true")

    @property
    def loss_scale(self) -> float:
        """The scale of the first loss now."""
        return float(self._amp.state_dict()["loss_scaler0"]["loss_scale"])

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Hand the module and its optimizers to ``apex.amp.initialize``."""
        if not optimizers:
            return model, optimizers, lr_schedulers
        wrapped = isinstance(model, DistributedDataParallel)
        if wrapped and self.opt_level in ("O2", "O3"):
            raise MisconfigurationException(
                f"ApexAMP(backend='apex') with DistributedDataParallel: expected 'O0' or 'O1', got {self.opt_level!r}: "
                "Lightning wraps the model before apex could cast its weights. Take the native backend."
            )
        module: Any = model.module if wrapped else model
        self._optimizers = list(optimizers)
        self._amp.initialize(module, self._optimizers, opt_level=self.opt_level, verbosity=0, **self._settings)
        state, _ = find_scaler_state(loaded_checkpoint(module.trainer) or {})
        if state is not None:
            self._amp.load_state_dict(state)
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, loss_id: int = 0, **kwargs: Any) -> None:
        """Scale the loss, run the backward pass and let apex unscale its gradients and settle the scale."""
        chosen = self._optimizers if optimizer is None else optimizer
        with self._amp.scale_loss(tensor, chosen, loss_id=loss_id) as scaled:
            model.backward(scaled, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, clip, then let apex step or skip."""
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            return result
        return optimizer.step(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scalers' state; it loads under either backend."""
        return dict(self._amp.state_dict()) if self._optimizers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scalers' state, from either backend; gradients that wait for a step are lost."""
        if self._optimizers:
            self._amp.load_state_dict({k: v for k, v in state_dict.items() if k.startswith("loss_scaler")})


def is_native(backend: str) -> bool:
    """Whether ``backend`` is ``"native"`` and not ``"apex"``."""
    check_choice("backend", backend, ("native", "apex"), AmpUsageError)
    return backend == "native"


def take_over(plugin: Any, arguments: dict[str, Any]) -> None:
    """Turn an ``ApexAMP`` whose constructor has just begun, with these local variables, into a ``RealApexAMP``."""
    parameters = inspect.signature(type(plugin)).parameters
    given = {
        name: arguments[name]
        for name, parameter in parameters.items()
        if name not in ("opt_level", "backend") and arguments[name] != parameter.default
    }
    plugin.__class__ = RealApexAMP
    plugin.__init__(arguments["opt_level"], **given)
