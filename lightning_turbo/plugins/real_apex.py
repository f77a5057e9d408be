"""``Trainer(plugins=[RealApexAMP("O1")])``: an installed NVIDIA apex as a Lightning precision plugin."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo._lightning import (
    MisconfigurationException,
    Precision,
    check_binding,
    repr_of_precision,
)
from lightning_turbo._trainer import loaded_checkpoint, refuse_as_callback
from lightning_turbo.amp.convert import find_scaler_state
from lightning_turbo.errors import MissingExtraError

__all__ = ["RealApexAMP", "import_apex_amp"]

_ADVICE = (
    "NVIDIA removed it after tag 25.05, and `pip install apex` installs an unrelated project. Build NVIDIA's apex at "
    "tag 25.05 or older from https://github.com/NVIDIA/apex, or use ApexAMP, which needs no apex."
)


def import_apex_amp() -> Any:
    """Return the module ``apex.amp`` of NVIDIA's apex.

    Raises:
        MissingExtraError: If apex is not installed or has no ``amp``.
    """
    try:
        amp = importlib.import_module("apex.amp")
        amp.initialize  # noqa: B018  # missing in a namespace package of that name
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(f"RealApexAMP needs apex.amp of NVIDIA's apex: {error}. {_ADVICE}") from error
    return amp


class RealApexAMP(Precision):
    """Use NVIDIA apex itself for casts, master weights and scaling: ``Trainer(plugins=[RealApexAMP("O1")])``.

    Intended for comparisons with ``ApexAMP``, which needs no apex. The scale is updated once per backward pass, as in
    apex, and apex's limits apply: one set-up per process, no bfloat16, master weights that are rounded to half at the
    start and not part of checkpoints, casts only in calls of the LightningModule itself (``self(x)``), and, under O1,
    patched torch functions until the process ends. A checkpoint has the scaler's state under ``"RealApexAMP"``; either
    plugin can resume from the other's.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        **settings: Additional arguments of ``apex.amp.initialize``, such as ``loss_scale``. apex checks them when
            training begins.

    Raises:
        MissingExtraError: If apex with ``apex.amp`` is not installed.
    """

    state_key = refuse_as_callback("plugins=[...]")
    __repr__ = repr_of_precision

    def __init__(self, opt_level: str = "O1", **settings: Any) -> None:
        super().__init__()
        check_binding("RealApexAMP")
        self.opt_level = opt_level
        self._amp = import_apex_amp()
        self._settings = settings
        self._optimizers: list[Optimizer] = []

    @property
    def precision(self) -> str:  # type: ignore[override]  # Lightning's is a class attribute
        """Lightning's name for the closest of its own precisions."""
        return {"O0": "32-true", "O1": "16-mixed"}.get(self.opt_level, "16-true")

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return float(self._amp.state_dict()["loss_scaler0"]["loss_scale"])

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Pass the module and its optimizers to ``apex.amp.initialize``."""
        if not optimizers:
            return model, optimizers, lr_schedulers
        wrapped = isinstance(model, DistributedDataParallel)
        if wrapped and self.opt_level in ("O2", "O3"):
            raise MisconfigurationException(
                f"RealApexAMP with DistributedDataParallel: expected 'O0' or 'O1', got {self.opt_level!r}: Lightning "
                "wraps the model before apex can cast its weights. Use ApexAMP."
            )
        module: Any = model.module if wrapped else model
        self._optimizers = list(optimizers)
        settings = {"opt_level": self.opt_level, "verbosity": 0, **self._settings}
        self._amp.initialize(module, self._optimizers, **settings)
        state, _ = find_scaler_state(loaded_checkpoint(module.trainer))
        if state is not None:
            self._amp.load_state_dict(state)
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, run the backward pass, and let apex unscale the gradients and update the scale."""
        chosen = self._optimizers if optimizer is None else optimizer
        with self._amp.scale_loss(tensor, chosen) as scaled:
            model.backward(scaled, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, clip, then let apex step or skip."""
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            return result
        return optimizer.step(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return dict(self._amp.state_dict()) if self._optimizers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scaler's state, saved by this plugin or by ``ApexAMP``."""
        if self._optimizers:
            self._amp.load_state_dict({k: v for k, v in state_dict.items() if k.startswith("loss_scaler")})
