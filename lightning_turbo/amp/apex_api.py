"""apex.amp's calls for plain torch loops: ``from lightning_turbo import amp`` in place of ``from apex import amp``."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lightning_turbo._checks import expect, is_whole
from lightning_turbo.amp import registration
from lightning_turbo.amp.casts import LevelCasts, refuse_deepspeed
from lightning_turbo.amp.grad_scaler import ApexGradScaler, gradients_of, params_of
from lightning_turbo.amp.half import Hook, cast_floats, refuse_half
from lightning_turbo.amp.levels import HALF_DTYPES, OptLevel, half_dtype_for
from lightning_turbo.errors import AmpLookupError, AmpStateError, AmpUsageError

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
    """The state that ``initialize`` sets up, from there to ``end``, which undoes all of it.

    ``casts`` decides how the models compute; ``scalers`` holds one scaler per loss.
    """

    def __init__(self, casts: LevelCasts, scalers: list[ApexGradScaler], verbosity: int) -> None:
        self.casts = casts
        self.scalers = scalers
        self.verbosity = verbosity
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(casts.restore)

    def attach(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Skip the steps of an optimizer after an overflow, and run its other steps without O1's casts.

        As in apex, ``step`` is replaced on the optimizer instance: step hooks cannot skip a step, and a wrapper around
        an optimizer may have none.
        """
        self.casts.attach(optimizer, models)
        inner = optimizer.step
        earlier = vars(optimizer).get("step")

        @functools.wraps(inner)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(optimizer, inner, args, kwargs)

        # A bound method, because torch's schedulers read the function inside it when they wrap it.
        ours = vars(optimizer)["step"] = types.MethodType(step, optimizer)
        self._cleanup.callback(_put_back_step, optimizer, ours, earlier)

    def start_casts(self, models: Sequence[nn.Module]) -> None:
        """Start O1's casts."""
        casts = self.casts.function_casts
        dtype = self.casts.properties.cast_model_outputs
        if casts is None:
            return
        if dtype is not None:
            hook = Hook(lambda module, args, output: cast_floats(output, dtype))
            for model in models:
                self._cleanup.callback(model.register_forward_hook(hook).remove)
        registration.apply_registered(casts)
        self._cleanup.callback(registration.restore_registered)
        casts.start()
        self._cleanup.callback(casts.stop)

    def end(self) -> None:
        """Restore models and optimizers."""
        self._cleanup.close()

    def _step(self, optimizer: Optimizer, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if _session is not self:  # the session has ended, but a scheduler still wraps this step
            return inner(*args, **kwargs)
        closure = kwargs.get("closure", args[0] if args else None)
        state = gradients_of(optimizer)
        if closure is not None and (self.casts.keeps_masters or state.overflow):
            raise AmpUsageError(
                "optimizer.step(closure): a closure cannot run at O2 or in a skipped step, as in apex. Call it "
                "first, then step()."
            )
        # Otherwise torch's schedulers warn about a missing step() if this one is skipped.
        vars(optimizer)["_opt_called"] = True
        run = functools.partial(inner, *args, **kwargs)
        try:
            # O1's casts would change the arithmetic of the update. As in apex, a closure runs without them too.
            with disable_casts():
                if state.overflow is not None:
                    state.scaled_by = None  # as in apex, also gradients that the program has left scaled
                    return self.scalers[0].step(optimizer, run)
                # No pass has unscaled these gradients since the last step: the program has assigned them or left them
                # scaled, or steps again. As in apex, such a step is made unchecked.
                state.skipped = False
                return run()
        finally:
            state.overflow = state.scaled_by = None

    @contextlib.contextmanager
    def backward(self, optimizers: Sequence[Optimizer], loss_id: int, delay_unscale: bool) -> Iterator[None]:
        """Wrap the backward pass of a loss, which adds to the gradients of other passes and losses."""
        scaler = self.scalers[loss_id]
        for state in map(gradients_of, optimizers):
            if state.scaled_by not in (None, scaler):
                waiting = [each is state.scaled_by for each in self.scalers].index(True)
                raise AmpUsageError(
                    f"loss_id={loss_id!r}: expected loss_id={waiting!r}, whose scaled "
                    "gradients are still accumulated. Step first, or use one loss_id per window."
                )
        with scaler.backward(optimizers, unscale=not delay_unscale), self.casts.backward_context():
            yield

    def settle(self, optimizers: Sequence[Optimizer], loss_id: int) -> None:
        """Update the scale of a loss after a backward pass, and log an overflow."""
        scaler = self.scalers[loss_id]
        # As in apex, the host waits here and not again in the step.
        overflow = bool(scaler.settle())
        for state in map(gradients_of, optimizers):
            state.overflow = bool(state.overflow)
        if not overflow:
            return
        scale = scaler.get_scale()
        if self.verbosity > 0:
            said = "Gradient overflow. Skipping step, loss scaler %d reducing loss scale to %g"
            _logger.warning(said, loss_id, scale)
        if scale == 0.0:
            raise AmpStateError(
                f"Loss scaler {loss_id} has reduced its scale to zero, because the gradients of every pass were "
                "inf or NaN. Look for the first loss that is not finite."
            )


def _put_back_step(optimizer: Optimizer, ours: Any, earlier: Any) -> None:
    """Undo ``attach``, unless something has wrapped its replacement."""
    if vars(optimizer).get("step") is ours:
        del vars(optimizer)["step"]
        if earlier is not None:
            vars(optimizer)["step"] = earlier


_Models = TypeVar("_Models", bound="nn.Module | list[Any]")
_Optimizers = TypeVar("_Optimizers", bound="Optimizer | list[Any]")

_session: _Session | None = None
_disabled = False  # by an initialize with enabled=False


@overload
def initialize(models: _Models, optimizers: None = None, *args: Any, **settings: Any) -> _Models: ...


@overload
def initialize(
    models: _Models, optimizers: _Optimizers, *args: Any, **settings: Any
) -> tuple[_Models, _Optimizers]: ...


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: OptLevel = "O1",
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
    keep_fp32_modules: Sequence[str | type[nn.Module]] = (),
    cast_lists: str | None = None,
) -> Any:
    """Prepare models and optimizers for O0, O1, O2 or O3, in place.

    Call it once for all models and optimizers, after the models are on their device and before they are wrapped in
    DataParallel or DistributedDataParallel. A second call undoes the first one. At O2 the models' parameters stay
    float32 and the optimizers update them; half precision copies are used while a model is called.

    Args:
        models: A module or a list of modules, in float32.
        optimizers: An optimizer or a list of them, built on these models; ``None`` for evaluation.
        enabled: ``False`` does nothing but undo an earlier ``initialize``.
        opt_level: ``"O0"`` to ``"O3"``.
        cast_model_type: Overrides the level: dtype of weights and arithmetic.
        patch_torch_functions: Overrides the level: ``False`` disables O1's casts. No torch function is ever patched.
        keep_batchnorm_fp32: Overrides the level: affine batch norm stays float32. Also as ``"True"`` or ``"False"``.
        master_weights: Overrides the level: parameters stay float32 and are cast in calls; ``False`` makes them half.
        loss_scale: Overrides the level: ``"dynamic"`` or a factor above zero, also as a string.
        cast_model_outputs: Overrides the level: dtype of the models' floating-point outputs.
        num_losses: Number of losses with a scaler of their own.
        verbosity: 0 logs nothing; 1 logs skipped steps as warnings to the logger ``lightning_turbo.amp``.
        min_loss_scale: Lower limit of the dynamic scale.
        max_loss_scale: Upper limit of the dynamic scale.
        dtype: The half dtype (not in apex). ``None`` selects float16 for models on CUDA, bfloat16 elsewhere.
        scale_window: Passes without overflow before the dynamic scale doubles (not in apex).
        keep_fp32_modules: Names of modules as in ``model.named_modules()``, or classes, that compute in float32 at O2
            and O3, together with their submodules (not in apex).
        cast_lists: The lists that O1 follows (not in apex): ``"apex"``, or ``"torch"`` for those of ``torch.autocast``.
            ``None`` selects apex's with float16 and torch's, as in ``ApexAMP``, with bfloat16.

    Returns:
        The same objects: the models alone without optimizers, otherwise the pair.

    Raises:
        AmpUsageError: If the level or an override is invalid, a model is already wrapped or in half precision, or an
            optimizer is passed twice (``RuntimeError``, as in apex).
        TypeError: If ``models`` or ``optimizers`` has the wrong type.

    Warns:
        TurboWarning: If an optimizer holds parameters of none of the models, at O2 and O3.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> loss = model(torch.ones(4, 2)).mean()
        >>> with scale_loss(loss, optimizer) as scaled:
        ...     scaled.backward()
        >>> optimizer.step()
        >>> model.weight.dtype, next(master_params(optimizer)) is model.weight
        (torch.float32, True)

    Source: the API of NVIDIA apex.amp.
    """
    global _disabled, _session
    model_list = _as_list_of("models", models, nn.Module)
    optimizer_list = [] if optimizers is None else _as_list_of("optimizers", optimizers, Optimizer)
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        shutdown()
        _disabled = True
        return result
    expect(is_whole(num_losses, 1), "num_losses", num_losses, "an integer of 1 or more", AmpUsageError)
    device_type = _device_type(model_list)
    half = half_dtype_for(device_type) if dtype is None else dtype
    casts = LevelCasts(
        opt_level,
        device_type=device_type,
        dtype=dtype,
        keep_fp32_modules=keep_fp32_modules,
        # apex's lists are for float16. bfloat16, which apex never had, is cast as under ``ApexAMP``.
        cast_lists=cast_lists or ("torch" if half is torch.bfloat16 else "apex"),
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
    )
    limits = {"growth_interval": scale_window, "min_scale": min_loss_scale, "max_scale": max_loss_scale}
    scalers = [ApexGradScaler(casts.properties.loss_scale, **limits) for _ in range(num_losses)]
    _check_optimizers(optimizer_list)
    shutdown()
    for model in model_list:
        _check_model(model, casts)
    casts.convert(model_list)
    _session = _Session(casts, scalers, verbosity)
    try:
        for optimizer in optimizer_list:
            _session.attach(optimizer, model_list)
        _session.start_casts(model_list)
    except BaseException:
        shutdown()
        raise
    return result


def shutdown() -> None:
    """Undo ``initialize``: models and optimizers are as before.

    apex has no such call; its casts last until the process ends. Weights keep what they learned, in float32.
    """
    global _disabled, _session
    if _session is not None:
        _session.end()
    _session = None
    _disabled = False


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss for its backward pass; on exit, unscale the gradients and update the scale.

    The scale is updated once per backward pass, as in apex. After an overflow the optimizers skip their next step.

    Args:
        loss: A scalar of any floating-point dtype; it is converted to float32.
        optimizers: The optimizer or list of optimizers whose gradients the backward pass computes.
        loss_id: Index of the scaler to use, below ``num_losses``.
        model: Not used; accepted for compatibility with apex.
        delay_unscale: Leave the gradients scaled: for all micro-batches of an accumulation except the last. Required
            under DistributedDataParallel's ``no_sync``, because gradients unscaled there are not averaged over the
            ranks.
        delay_overflow_check: Not used; accepted for compatibility with apex. Unscaling includes the check.

    Yields:
        The loss to call ``backward`` on.

    Raises:
        AmpStateError: If ``initialize`` was not called (``RuntimeError``, as in apex), or on exit if repeated overflows
            have reduced the dynamic scale to zero.
        AmpLookupError: If there is no scaler ``loss_id`` (``IndexError``).
        AmpUsageError: If an optimizer was not passed to the last ``initialize``.
        TypeError: If ``optimizers`` is neither an optimizer nor a list of them.

    Note:
        With a dynamic scale, the exit copies the overflow flag to the host, as in apex.
    """
    if _disabled:
        yield loss
        return
    session = _need_session("scale_loss")
    optimizer_list = _as_list_of("optimizers", optimizers, Optimizer)
    known = is_whole(loss_id, 0) and loss_id < len(session.scalers)
    expect(known, "loss_id", loss_id, f"0 to {len(session.scalers) - 1}, or a larger num_losses", AmpLookupError)
    foreign = [type(optimizer).__name__ for optimizer in optimizer_list if not _is_known(optimizer)]
    if foreign:
        raise AmpUsageError(
            f"amp.scale_loss: expected optimizers of the last amp.initialize, got another {foreign[0]}, which would "
            "step after an overflow. Initialize all models and optimizers in one call, as lists; or add the parameters "
            "to a known optimizer with optimizer.add_param_group."
        )
    with session.backward(optimizer_list, loss_id, delay_unscale):
        yield session.scalers[loss_id].scale(loss)
    if not delay_unscale:
        session.settle(optimizer_list, loss_id)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer updates; they are the model's own."""
    return params_of(optimizer)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of every scaler: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``.

    Args:
        destination: A dict to fill and return instead of a new one.

    Raises:
        AmpStateError: If ``initialize`` was not called, or with ``enabled=False`` (``AttributeError``, as in apex).
    """
    scalers = _need_session("state_dict").scalers
    target = OrderedDict() if destination is None else destination
    target.update({f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(scalers)})
    return target


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load the scalers' state, saved by this package or by apex.

    Surplus entries are ignored, and scalers without an entry keep their state; both are logged.

    Args:
        state_dict: A result of ``state_dict``.

    Raises:
        AmpUsageError: If a key does not have the form ``loss_scalerN`` (``RuntimeError``, as in apex).
        KeyError: If an entry lacks ``loss_scale`` or ``unskipped``.
        AmpStateError: If ``initialize`` was not called.
    """
    scalers = _need_session("load_state_dict").scalers
    valid = all(key.startswith("loss_scaler") for key in state_dict)
    expect(valid, "amp.load_state_dict", [*state_dict], "keys loss_scaler0, loss_scaler1, ...", AmpUsageError)
    if len(state_dict) != len(scalers):
        _logger.warning("The state has %d loss scalers, this run %d.", len(state_dict), len(scalers))
    for index, scaler in enumerate(scalers):
        if f"loss_scaler{index}" in state_dict:
            scaler.load_state_dict(state_dict[f"loss_scaler{index}"])


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Disable O1's casts inside the block, also under ``ApexAMP``; no effect at other levels."""
    casts = registration.casts_in_force()
    with contextlib.nullcontext() if casts is None else torch.autocast(casts.device_type, enabled=False):
        yield


def _need_session(call: str) -> _Session:
    if _disabled:
        raise AmpStateError(f"amp.{call}: initialize was called with enabled=False, so there is no loss scaler.")
    if _session is None:
        raise AmpStateError(
            f"amp.{call} was called before amp.initialize. Call initialize first; or, in a LightningModule under a "
            "Trainer with ApexAMP, remove the call: return the loss, or call self.manual_backward(loss)."
        )
    return _session


def _is_known(optimizer: Optimizer) -> bool:
    return _session is not None and optimizer in _session.casts.optimizers


def _as_list_of(name: str, value: Any, kind: type) -> list[Any]:
    values = value if type(value) is list else [value]
    valid = all(issubclass(type(item), kind) for item in values)  # a wrapper may claim another class
    expected = f"a {kind.__module__}.{kind.__name__} or a list of them (for a wrapper such as LARC, its content)"
    expect(valid, name, value, expected, TypeError)
    return list(values)


def _device_type(models: Sequence[nn.Module]) -> str:
    parameters = (parameter for model in models for parameter in model.parameters())
    return next((parameter.device.type for parameter in parameters), "cpu")


def _check_model(model: nn.Module, casts: LevelCasts) -> None:
    refuse_deepspeed(type(model))
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise AmpUsageError(
            f"amp.initialize: expected an unwrapped model, got a {type(model).__name__}. Wrap the model afterwards."
        )
    refuse_half(model, HALF_DTYPES if casts.keeps_masters else [torch.float16, casts.dtype])


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    if len(set(optimizers)) < len(optimizers) or any(map(_is_known, optimizers)):
        raise AmpUsageError(
            "amp.initialize: expected each optimizer once, got one twice. Create new ones, or call amp.shutdown() "
            "before initializing again."
        )
    params = (param for optimizer in optimizers for param in params_of(optimizer))
    odd = {param.dtype for param in params if not isinstance(param, nn.Parameter)} - {torch.float32, *HALF_DTYPES}
    expect(not odd, "amp.initialize", odd, "float32 parameters in optimizers", TypeError)
