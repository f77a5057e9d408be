"""apex.amp's calls for plain torch loops: ``from lightning_turbo import amp`` in place of ``from apex import amp``."""

from __future__ import annotations

import contextlib
import logging
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo.amp import functions
from lightning_turbo.amp.engine import AmpEngine
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.amp.model_casts import first_tensor_of
from lightning_turbo.errors import AmpStateError, AmpUsageError

__all__ = [
    "disable_casts",
    "initialize",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "shutdown",
    "state_dict",
]

_logger = logging.getLogger("lightning_turbo.amp")


class _Session:
    """What ``initialize`` set up last, for the calls that name neither model nor optimizer."""

    def __init__(self, engine: AmpEngine | None, optimizers: list[Optimizer], verbosity: int) -> None:
        self.engine = engine
        self.optimizers = optimizers
        self.verbosity = verbosity
        self.scaled: set[int] = set()  # optimizers whose gradients wait for their unscaling
        self.stepped: set[int] = set()  # optimizers that have used theirs

    def no_longer_needed(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield an optimizer's masters but for those that another one holds and is yet to step with."""
        waiting = [other for other in self.optimizers if other is not optimizer and id(other) not in self.stepped]
        held = {id(param) for other in waiting for param in master_params(other)}
        if self.engine is not None and self.engine.weights is not None:
            for _, master in self.engine.weights.pairs(optimizer):
                if id(master) not in held:
                    yield master


_session: _Session | None = None


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: torch.dtype | None = None,
    scale_window: int = 2000,
    exact_masters: bool = True,
    cast_lists: str | None = None,
) -> Any:
    """Prepare models and optimizers for O0, O1, O2 or O3, in place.

    Call it after the models are on their device and before they are wrapped in DataParallel or
    DistributedDataParallel. It may be called again, for other models, as cross-validation does; the casts of O1 and
    ``scale_loss`` then follow the last call.

    Args:
        models: A module or a list of modules, in float32.
        optimizers: An optimizer or a list of them, built on these models; ``None`` for evaluation.
        enabled: ``False`` makes this and ``scale_loss`` do nothing.
        opt_level: ``"O0"`` to ``"O3"``.
        cast_model_type: Override of the level: dtype of weights and arithmetic.
        patch_torch_functions: Override: ``False`` switches O1's casts off. Nothing of torch's is ever patched.
        keep_batchnorm_fp32: Override: affine batch norm stays float32. Also the texts ``"True"`` and ``"False"``.
        master_weights: Override: the optimizers update float32 masters.
        loss_scale: Override: ``"dynamic"``, or a factor above zero, also as text.
        cast_model_outputs: Override: dtype of the models' floating outputs.
        num_losses: How many losses get a scaler of their own.
        verbosity: 0 logs nothing; 1 logs skipped steps to the logger ``lightning_turbo.amp``.
        min_loss_scale: Floor of the dynamic scale.
        max_loss_scale: Ceiling of the dynamic scale.
        dtype: Beyond apex: the half dtype. ``None`` takes float16 for models on CUDA, bfloat16 elsewhere.
        scale_window: Beyond apex: passes without overflow before the dynamic scale doubles.
        exact_masters: Beyond apex: ``False`` rounds O2's masters to half at the start, as apex does.
        cast_lists: Beyond apex: whose lists O1 obeys, ``"apex"`` or ``"torch"``.

    Returns:
        The same objects: models alone if no optimizers were given, else the pair.

    Raises:
        AmpUsageError: If the level or an override is refused, a model is wrapped already or in half precision,
            or an optimizer comes a second time (``RuntimeError``, as in apex).
        TypeError: If models or optimizers are neither an object of the right kind nor a list of them.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> loss = model(torch.ones(4, 2)).mean()
        >>> with scale_loss(loss, optimizer) as scaled:
        ...     scaled.backward()
        >>> optimizer.step()
        >>> model.weight.dtype, next(master_params(optimizer)).dtype
        (torch.bfloat16, torch.float32)

    Source: the calls of NVIDIA apex.amp.
    """
    global _session
    model_list = _listed("models", models, nn.Module)
    optimizer_list = [] if optimizers is None else _listed("optimizers", optimizers, Optimizer)
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        shutdown()
        _session = _Session(None, optimizer_list, verbosity)
        return result
    engine = AmpEngine(
        opt_level,
        device_type=_device_type(model_list),
        dtype=dtype,
        exact_masters=exact_masters,
        num_losses=num_losses,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
        scale_window=scale_window,
        cast_lists=cast_lists or "apex",
        cast_cache=True,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
    )
    for model in model_list:
        _check_model(model, engine.dtype)
    for optimizer in optimizer_list:
        _check_optimizer(optimizer)
    shutdown()
    session = _Session(engine, optimizer_list, verbosity)
    engine.convert((module for model in model_list for module in model.modules()), model_list)
    for optimizer in optimizer_list:
        engine.attach(optimizer)
        _take_over(optimizer, session)
    if engine.function_casts is not None:
        functions.apply_registered(engine.function_casts)
        engine.function_casts.cast_outputs(model_list, engine.properties.cast_model_outputs)
        engine.function_casts.start(model_list)
    _session = session
    return result


def shutdown() -> None:
    """End what the last ``initialize`` keeps switched on: O1's casts, and the scalers of ``scale_loss``.

    Beyond apex, whose casts last as long as the process. Models stay as they are.
    """
    global _session
    if _session is not None and _session.engine is not None and _session.engine.function_casts is not None:
        _session.engine.function_casts.stop()
    functions.restore_registered()
    _session = None


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss for its backward pass; at the exit unscale the gradients and settle the scale.

    The scale is settled once per backward pass, as in apex. After an overflow the optimizers skip their next step.

    Args:
        loss: A scalar, of any floating dtype; it is taken to float32.
        optimizers: The optimizer or list of optimizers whose gradients this backward pass makes.
        loss_id: Which of the ``num_losses`` scalers to use.
        model: Accepted for apex's sake and not needed.
        delay_unscale: Leave the gradients scaled, for all micro-batches of an accumulation but the last.
        delay_overflow_check: Accepted for apex's sake; the check is part of the unscaling.

    Yields:
        The loss to call ``backward`` on.

    Raises:
        AmpStateError: If ``initialize`` was not called (``RuntimeError``, as in apex).
        AmpLookupError: If there is no scaler ``loss_id`` (``IndexError``).
        TypeError: If ``optimizers`` is neither an optimizer nor a list of them.

    Note:
        With a dynamic scale the exit fetches the overflow flag to the host, as apex's does.
    """
    session = _need_session("scale_loss")
    engine = session.engine
    if engine is None:
        yield loss
        return
    chosen = _listed("optimizers", optimizers, Optimizer)
    scaler = engine.scaler(loss_id)
    if scaler.is_identity and not engine.has_masters:
        with engine.backward_region():
            yield loss.float()
        engine.forget_casts()
        return
    waiting = any(id(optimizer) in session.scaled for optimizer in chosen)
    kept = {} if waiting or delay_unscale else engine.stash(chosen)
    with engine.backward_region():
        yield scaler.scale(loss)
    engine.forget_casts()
    if delay_unscale:
        session.scaled.update(map(id, chosen))
    else:
        engine.collect(chosen, kept, loss_id)
        session.stepped.difference_update(map(id, chosen))
        session.scaled.difference_update(map(id, chosen))
        overflow = scaler.overflowed
        scaler.update()
        if overflow and session.verbosity > 0:
            _logger.info("Gradient overflow. Skipping step, loss scaler %d to %g", loss_id, scaler.loss_scale)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer updates: float32 masters at O2, the model's own elsewhere."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return every scaler's state: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``.

    Args:
        destination: A dict to write to and return instead of a new one.

    Raises:
        AmpStateError: If ``initialize`` was not called, or with ``enabled=False`` (``AttributeError``, as in apex).
    """
    engine = _need_session("state_dict").engine
    if engine is None:
        raise AmpStateError("amp.state_dict: initialize was called with enabled=False, so there are no loss scalers.")
    target = OrderedDict() if destination is None else destination
    target.update(engine.state_dict())
    return target


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Take over the scalers' state, from here or from apex.

    More entries than there are scalers are left alone, fewer leave the others as they are; both are logged.

    Args:
        state_dict: What ``state_dict`` returned.

    Raises:
        AmpUsageError: If a key is not of the form ``loss_scalerN`` (``RuntimeError``, as in apex).
        KeyError: If an entry lacks ``loss_scale`` or ``unskipped``.
        AmpStateError: If ``initialize`` was not called.
    """
    engine = _need_session("load_state_dict").engine
    if engine is None:
        raise AmpStateError("amp.load_state_dict: initialize was called with enabled=False; there are no loss scalers.")
    unexpected = [key for key in state_dict if not key.startswith("loss_scaler")]
    if unexpected:
        raise AmpUsageError(
            f"amp.load_state_dict: unexpected keys {unexpected!r}; accepted are loss_scaler0, loss_scaler1, ... "
            "Pass what amp.state_dict() returned."
        )
    if len(state_dict) != len(engine.scalers):
        _logger.warning("The state has %d loss scalers, this run %d.", len(state_dict), len(engine.scalers))
    for index, scaler in enumerate(engine.scalers):
        if f"loss_scaler{index}" in state_dict:
            scaler.load_state_dict(state_dict[f"loss_scaler{index}"])


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Cast nothing inside this context; without effect where nothing is cast."""
    engine = _session.engine if _session is not None else None
    if engine is None or engine.function_casts is None:
        yield
        return
    with torch.autocast(engine.device_type, enabled=False):
        yield


def _need_session(call: str) -> _Session:
    if _session is None:
        raise AmpStateError(f"amp.{call} was called before amp.initialize. Call initialize first.")
    return _session


def _listed(name: str, value: Any, kind: type) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if type(value) is list and all(isinstance(item, kind) for item in value):
        return list(value)
    raise TypeError(
        f"{name}={value!r} is a {type(value).__name__}; accepted is a {kind.__module__}.{kind.__name__} "
        "or a list of them."
    )


def _device_type(models: Sequence[nn.Module]) -> str:
    for model in models:
        for parameter in model.parameters():
            return parameter.device.type
    return "cpu"


def _check_model(model: nn.Module, half: torch.dtype) -> None:
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise AmpUsageError(
            f"initialize was given a model wrapped in {type(model).__name__}; accepted is the model itself. Wrap it "
            "after initialize."
        )
    name = first_tensor_of(model, [torch.float16, half])
    if name is not None:
        raise AmpUsageError(
            f"initialize was given a model whose {name!r} is half precision; accepted is float32. Do not call .half() "
            "on the model: the level decides what becomes half."
        )


def _check_optimizer(optimizer: Optimizer) -> None:
    if isinstance(getattr(optimizer, "_lightning_turbo_amp", None), _Session):
        raise AmpUsageError(
            f"initialize was given a {type(optimizer).__name__} that an earlier initialize has taken over; accepted "
            "is an optimizer once. Build a new one."
        )
    for param in master_params(optimizer):
        if param.dtype not in (torch.float32, *HALF_DTYPES) and not isinstance(param, nn.Parameter):
            raise TypeError(f"An optimizer's parameter is {param.dtype}; accepted are float32 parameters.")


def _take_over(optimizer: Optimizer, session: _Session) -> None:
    """Let ``step`` and ``zero_grad`` of this one optimizer know of masters and skipped steps."""
    engine = session.engine
    if engine is None:
        return
    step, zero_grad = optimizer.step, optimizer.zero_grad

    def amp_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None and (engine.has_masters or engine.will_skip(self)):
            raise AmpUsageError(
                "optimizer.step was given a closure; at O2 and on a skipped step none is accepted, because the "
                "gradients of masters are made by scale_loss. Run it first and call step()."
            )
        with disable_casts():
            result = engine.step(self, step if closure is None else lambda: step(closure))
        engine.forget_overflow(self)  # one step is skipped, as in apex
        engine.forget_casts()
        session.stepped.add(id(self))
        for master in session.no_longer_needed(self):
            master.grad = None
        self._opt_called = True  # type: ignore[attr-defined]  # for schedulers: a skipped step is no step forgotten
        return result

    amp_step.__dict__.update(getattr(step, "__dict__", {}))  # a scheduler made before has marked its own wrapper

    def amp_zero_grad(self: Optimizer, set_to_none: bool | None = None) -> None:
        pairs = [] if engine.weights is None else engine.weights.pairs(self)
        if not pairs:
            zero_grad(*(() if set_to_none is None else (set_to_none,)))
            return
        masters = {id(master) for _, master in pairs}
        for _, master in pairs:
            master.grad = None
        # apex zeroes what the model holds; set_to_none=True releases it.
        own = [param for param in master_params(self) if id(param) not in masters]
        for param in (*(weight for weight, _ in pairs), *own):
            if param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)

    optimizer.step = types.MethodType(amp_step, optimizer)
    optimizer.zero_grad = types.MethodType(amp_zero_grad, optimizer)
    optimizer._lightning_turbo_amp = session  # type: ignore[attr-defined]  # marks it as taken over
