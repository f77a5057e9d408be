"""apex.amp's calls for plain torch loops: ``from lightning_turbo import amp`` in place of ``from apex import amp``."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo.amp import functions
from lightning_turbo.amp.engine import AmpEngine
from lightning_turbo.amp.levels import HALF_DTYPES
from lightning_turbo.amp.loss_scaling import LossScaler
from lightning_turbo.amp.model_casts import first_tensor_of
from lightning_turbo.amp.sessions import Session
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


_session: Session | None = None  # of the last initialize, for the calls that name no optimizer
_scalers: list[LossScaler] = []  # those of the last initialize, for the optimizers of all, as in apex
_disabled = False  # by an initialize with enabled=False


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
    cast_cache: bool = False,
) -> Any:
    """Prepare models and optimizers for O0, O1, O2 or O3, in place.

    Call it after the models are on their device and before they are wrapped in DataParallel or
    DistributedDataParallel. It may be called again, for other models: every optimizer keeps to the level of its own
    call, while O1's casts and the loss scalers are those of the last one, as in apex.

    At O2, weights that are set in place between this call and the first backward pass count, also in the masters.
    Under DistributedDataParallel the masters of all ranks begin as those of its first.

    Args:
        models: A module or a list of modules, in float32.
        optimizers: An optimizer or a list of them, built on these models; ``None`` for evaluation.
        enabled: ``False`` makes this do nothing, and ``scale_loss`` of all that was initialized before.
        opt_level: ``"O0"`` to ``"O3"``.
        cast_model_type: Override of the level: dtype of weights and arithmetic.
        patch_torch_functions: Override: ``False`` switches O1's casts off. Nothing of torch's is ever patched.
        keep_batchnorm_fp32: Override: affine batch norm stays float32. Also the texts ``"True"`` and ``"False"``.
        master_weights: Override: the optimizers update float32 masters.
        loss_scale: Override: ``"dynamic"``, or a factor above zero, also as text.
        cast_model_outputs: Override: dtype of the models' floating outputs.
        num_losses: How many losses get a scaler of their own.
        verbosity: 0 logs nothing; 1 warns of skipped steps in the logger ``lightning_turbo.amp``.
        min_loss_scale: Floor of the dynamic scale.
        max_loss_scale: Ceiling of the dynamic scale.
        dtype: Beyond apex: the half dtype. ``None`` takes float16 for models on CUDA, bfloat16 elsewhere.
        scale_window: Beyond apex: passes without overflow before the dynamic scale doubles.
        exact_masters: Beyond apex: ``False`` rounds O2's masters to half at the start, as apex does.
        cast_lists: Beyond apex: whose lists O1 obeys, ``"apex"`` or ``"torch"``.
        cast_cache: Beyond apex: ``True`` casts a weight once, not at every use, until ``scale_loss`` exits or a step.
            For networks that use a weight many times; it must not be changed between forward passes in any other way.

    Returns:
        The same objects: models alone if no optimizers were given, else the pair.

    Raises:
        AmpUsageError: If the level or an override is refused, a model is wrapped already or in half precision,
            an optimizer comes a second time (``RuntimeError``, as in apex), or one cannot work with O2's masters.
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
    global _disabled, _session
    model_list = _listed("models", models, nn.Module)
    optimizer_list = [] if optimizers is None else _listed("optimizers", optimizers, Optimizer)
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        shutdown()
        _disabled = True
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
        cast_cache=cast_cache,
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
    try:
        engine.convert((module for model in model_list for module in model.modules()), model_list)
        for optimizer in optimizer_list:
            engine.attach(optimizer)
    except AmpUsageError:
        engine.restore()
        raise
    shutdown()
    _session = Session(engine, model_list, optimizer_list, verbosity)
    _scalers[:] = engine.scalers
    engine.scalers = _scalers
    if engine.function_casts is not None:
        functions.apply_registered(engine.function_casts)
        engine.function_casts.cast_outputs(model_list, engine.properties.cast_model_outputs)
        engine.function_casts.start(model_list)
    return result


def shutdown() -> None:
    """End what ``initialize`` keeps switched on: O1's casts, and the scalers of ``scale_loss``.

    Beyond apex, whose casts last as long as the process. Models stay as they are.
    """
    global _disabled, _session
    if _session is not None and _session.engine.function_casts is not None:
        _session.engine.function_casts.stop()
    functions.restore_registered()
    _session, _disabled = None, False


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
        AmpStateError: If ``initialize`` was not called (``RuntimeError``, as in apex), or at the exit if overflow after
            overflow has brought the dynamic scale to zero.
        AmpLookupError: If there is no scaler ``loss_id`` (``IndexError``).
        AmpUsageError: If a later ``initialize`` with ``enabled=False`` left an optimizer of O2 without gradients.
        TypeError: If ``optimizers`` is neither an optimizer nor a list of them.

    Warns:
        TurboWarning: If gradients of passes under DistributedDataParallel's ``no_sync``, without ``delay_unscale``,
            would not be averaged over the ranks.

    Note:
        With a dynamic scale the exit fetches the overflow flag to the host, as apex's does.
    """
    if _disabled:
        _check_not_left(optimizers)
        yield loss
        return
    session = _need_session("scale_loss")
    engine, scaler = session.engine, session.engine.scaler(loss_id)
    parts: dict[Session, list[Optimizer]] = {}
    for optimizer in _listed("optimizers", optimizers, Optimizer):
        parts.setdefault(Session.of(optimizer) or session, []).append(optimizer)
    idle = scaler.is_identity and not any(part.engine.has_masters for part in parts)
    with contextlib.ExitStack() as stack:
        if not idle:
            for part, own in parts.items():
                stack.enter_context(part.backward(own, loss_id, delay_unscale))
        stack.enter_context(engine.backward_region())
        yield scaler.scale(loss)
    engine.forget_casts()
    if idle or delay_unscale:
        return
    overflow = scaler.overflowed
    scaler.update()
    if overflow:
        scale = scaler.loss_scale
        if session.verbosity > 0:
            _logger.warning(
                "Gradient overflow. Skipping step, loss scaler %d reducing loss scale to %g", loss_id, scale
            )
        if scale == 0.0:
            raise AmpStateError(
                f"Loss scaler {loss_id} has halved its scale down to zero, because the gradients of every pass were "
                "inf or NaN; no step will be taken any more. Look for the first loss that is not finite: its cause is "
                "not the scale."
            )


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
    """Cast nothing inside this context; without effect where nothing is cast. Under ``ApexAMP`` too."""
    casts = functions.casts_in_force()
    with contextlib.nullcontext() if casts is None else torch.autocast(casts.device_type, enabled=False):
        yield


def _need_session(call: str) -> Session:
    if _disabled:
        raise AmpStateError(f"amp.{call}: initialize was called with enabled=False, so there are no loss scalers.")
    if _session is None:
        raise AmpStateError(
            f"amp.{call} was called before amp.initialize. Call initialize first; or, in a LightningModule that a "
            "Trainer with ApexAMP trains, leave it out: return the loss, or call self.manual_backward(loss)."
        )
    return _session


def _listed(name: str, value: Any, kind: type) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if type(value) is list and all(isinstance(item, kind) for item in value):
        return list(value)
    instead = ""
    if isinstance(getattr(value, "optim", None), Optimizer):  # apex's LARC
        instead = (
            f" A wrapper such as {type(value).__name__} is none. Pass the optimizer in it; for layer-wise rates take "
            "lightning_turbo.lars(model, lr)."
        )
    raise TypeError(
        f"{name}={value!r} is a {type(value).__name__}; accepted is a {kind.__module__}.{kind.__name__} "
        f"or a list of them.{instead}"
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


def _check_not_left(optimizers: Any) -> None:
    """Refuse optimizers whose masters get no gradient while ``scale_loss`` does nothing."""
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        session = Session.of(optimizer)
        if session is not None and session.engine.has_masters:
            raise AmpUsageError(
                f"scale_loss was given a {type(optimizer).__name__} that updates O2's masters, after an initialize "
                "with enabled=False, which ends scale_loss for all; its model would never move. Leave that initialize "
                "out: a model stays as it is without."
            )


def _check_optimizer(optimizer: Optimizer) -> None:
    if Session.of(optimizer) is not None:
        raise AmpUsageError(
            f"initialize was given a {type(optimizer).__name__} that an earlier initialize has taken over; accepted "
            "is an optimizer once. Build a new one."
        )
    for param in master_params(optimizer):
        if param.dtype not in (torch.float32, *HALF_DTYPES) and not isinstance(param, nn.Parameter):
            raise TypeError(f"An optimizer's parameter is {param.dtype}; accepted are float32 parameters.")
