"""O1: decides for each function in which dtype it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_turbo._checks import expect
from lightning_turbo.amp import cast_lists
from lightning_turbo.amp.half import cast_floats, map_tensors
from lightning_turbo.errors import AmpUsageError

__all__ = ["BannedFunctionError", "FunctionCasts", "to_widest"]


def to_widest(value: Any) -> Any:
    """Return ``value`` with its floating-point tensors cast to the widest dtype among them."""
    dtypes = _float_dtypes(value)
    return value if len(dtypes) < 2 else cast_floats(value, functools.reduce(torch.promote_types, dtypes))


def _float_dtypes(value: Any, counts: Callable[[Tensor], bool] = torch.is_floating_point) -> list[torch.dtype]:
    """Return the distinct floating-point dtypes among the tensors of ``value`` for which ``counts`` is true."""
    found: dict[torch.dtype, None] = {}
    map_tensors(value, lambda t: (found.setdefault(t.dtype) if counts(t) else None, t)[1])
    return list(found)


class FunctionCasts:
    """The casts of O1 around functions: autocast, with apex's lists on top.

    Args:
        device_type: Device type of the model, such as ``"cuda"`` or ``"cpu"``; tensors elsewhere are not cast.
        dtype: The half dtype.
        lists: ``"torch"`` uses autocast alone, at no cost per call. ``"apex"`` follows apex's lists where autocast
            differs (layer_norm and gelu on a CPU, gelu on CUDA, banned functions, ...), at a few microseconds for every
            call of a torch function.

    Raises:
        AmpUsageError: If ``lists`` is anything else.

    Note:
        A weight is cast at each use, because autocast's cache would keep the old value after a change.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, lists: str) -> None:
        known = "'apex' (apex's lists of functions) or 'torch' (those of torch.autocast)"
        expect(lists in ("apex", "torch"), "cast_lists", lists, known, AmpUsageError)
        self.device_type = device_type
        self.dtype = dtype
        self._lists = lists
        self._mode = _ApexLists(device_type, dtype, dict(_actions())) if lists == "apex" else None
        self._entered: contextlib.ExitStack | None = None

    def __reduce__(self) -> Any:
        # Some torch functions cannot be pickled. Registered functions are registered again when training starts.
        return FunctionCasts, (self.device_type, self.dtype, self._lists)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that casts on this thread."""
        casts = torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=False)
        return casts if self._mode is None else _both(casts, self._mode)

    def backward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for the backward pass, inside which nothing is cast.

        A checkpointed forward pass is the exception: it restores its own autocast state and gets the same dtypes as the
        first time.
        """
        # The lists act wherever autocast is on, so they are in force for checkpointed passes; after start() they are
        # already. Autocast itself is on in plain loops and manual optimization, and off in a Trainer's own passes.
        lists = self._mode if self._entered is None else None
        if not torch.is_autocast_enabled(self.device_type):
            return lists or contextlib.nullcontext()
        off = torch.autocast(self.device_type, enabled=False)
        return off if lists is None else _both(off, lists)

    def start(self) -> None:
        """Cast on this thread until ``stop``, as ``apex.amp.initialize`` does for O1.

        In the threads of ``DataParallel``, to which torch passes the autocast state on, only autocast casts.
        """
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(self.forward_context())

    def stop(self) -> None:
        """Undo ``start``."""
        if self._entered is not None:
            self._entered.close()
            self._entered = None

    def register(self, function: Callable[..., Any], kind: str) -> None:
        """Add a torch function to a list: ``"half"``, ``"float"`` or ``"promote"``."""
        if self._mode is None:
            self._mode = _ApexLists(self.device_type, self.dtype, {})
        # The program's registration takes precedence: autocast no longer applies to the function.
        self._mode.actions[function] = (_CHANGES[kind], _ApexLists.leave_alone)


@contextlib.contextmanager
def _both(casts: torch.autocast, lists: _ApexLists) -> Iterator[None]:
    with casts, lists:
        yield


class _ApexLists(TorchFunctionMode):
    """Applies apex's lists wherever autocast is enabled, so that ``torch.autocast(enabled=False)`` is respected.

    ``FunctionCasts`` creates one and enters it together with autocast.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, actions: dict[Any, tuple[Any, Any]]) -> None:
        super().__init__()
        self.device_type = device_type
        self.dtype = dtype
        self.actions = actions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        action = self.actions.get(func)
        kwargs = kwargs or {}
        # Composite functions are entered even if autocast is off, because it may be switched on inside them.
        if action is None or not (action is _LOOK_INTO or torch.is_autocast_enabled(self.device_type)):
            return func(*args, **kwargs)
        change, run = action
        args, kwargs = change(self, func, args, kwargs)
        return run(self, func, args, kwargs)

    def here(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.device.type == self.device_type

    def cast(self, call: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
        """Cast the floating-point tensors of a call to ``dtype``, or only those whose dtype is ``only``."""

        def change(tensor: Tensor) -> Tensor:
            wanted = tensor.dtype is not dtype and only in (None, tensor.dtype) and self.here(tensor)
            return tensor.to(dtype) if wanted else tensor

        return map_tensors(call, change)

    # These methods change the arguments.

    def nothing(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def half(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.cast((args, kwargs), self.dtype)

    def half_beyond_autocast(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.cast((args, kwargs), self.dtype, only=torch.float64)

    def float(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.cast((args, kwargs), torch.float32)

    def promote(self, func: Any, args: Any, kwargs: Any) -> Any:
        return to_widest((args, kwargs))

    def match_self(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.cast((args, kwargs), args[0].dtype)

    def refuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.dtype in _float_dtypes((args, kwargs), self.here):
            name = func.__name__
            instead = cast_lists.BANNED["torch.nn.functional"].get(name) or f"the out-of-place {name.rstrip('_')}"
            raise BannedFunctionError(
                f"O1 refuses {name} on a {self.dtype} tensor: it is unsafe in half precision. Use {instead}; or cast "
                "its inputs to float32 and call it under torch.autocast(..., enabled=False)."
            )
        return args, kwargs

    # These methods run the function.

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def leave_alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast(self.device_type, enabled=False):
            return func(*args, **kwargs)

    def leave_alone_if_alike(self, func: Any, args: Any, kwargs: Any) -> Any:
        alike = len(_float_dtypes((args, kwargs))) < 2
        return self.leave_alone(func, args, kwargs) if alike else func(*args, **kwargs)

    def look_into(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return _without_its_own_dispatch(func)(*args, **kwargs)


@functools.cache
def _without_its_own_dispatch(func: Any) -> Any:
    """Return a copy of a torch function written in Python that does not dispatch to the active modes.

    Called from a mode, the original would call the mode again without end; the copy dispatches only its inner calls.
    """
    no = dict.fromkeys(_DISPATCH_CHECKS, lambda *_: False)
    copy = types.FunctionType(
        func.__code__, {**func.__globals__, **no}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_DISPATCH_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


_CHANGES = {"half": _ApexLists.half, "float": _ApexLists.float, "promote": _ApexLists.promote}
_LOOK_INTO = (_ApexLists.nothing, _ApexLists.look_into)
# For each list: how the arguments of its functions change, and how these run. The last list with a function wins.
_ACTIONS: tuple[tuple[Mapping[str, Iterable[str]], tuple[Any, Any]], ...] = (
    (cast_lists.PROMOTE, (_ApexLists.promote, _ApexLists.call)),
    (cast_lists.HALF, (_ApexLists.half, _ApexLists.call)),
    (cast_lists.HALF_IN_AUTOCAST, (_ApexLists.half_beyond_autocast, _ApexLists.call)),
    (cast_lists.FLOAT, (_ApexLists.float, _ApexLists.call)),
    (cast_lists.MATCH_SELF, (_ApexLists.match_self, _ApexLists.call)),
    (cast_lists.NOT_IN_PLACE, (_ApexLists.refuse, _ApexLists.call)),
    (cast_lists.BANNED, (_ApexLists.refuse, _ApexLists.call)),
    (cast_lists.LEFT_ALONE, (_ApexLists.nothing, _ApexLists.leave_alone)),
    (cast_lists.LEFT_ALONE_IF_ALIKE, (_ApexLists.nothing, _ApexLists.leave_alone_if_alike)),
    (cast_lists.LOOKED_INTO, _LOOK_INTO),
)


class BannedFunctionError(AmpUsageError, NotImplementedError):
    """A function that is too inaccurate in half precision was called with a half tensor under O1."""


def _actions() -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """Yield each function with its action."""
    for names, action in _ACTIONS:
        for namespace, functions in names.items():
            home: Any = torch.Tensor if namespace == "torch.Tensor" else importlib.import_module(namespace)
            yield from ((getattr(home, name), action) for name in functions)
