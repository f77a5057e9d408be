"""One call of a network at O2 or O3: half copies take the positions of float32 tensors, and give them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_turbo._pytree import map_tensors
from lightning_turbo.amp.levels import HALF_DTYPES

__all__ = ["Copies", "HalfCall", "Position", "Written", "is_affine_batch_norm", "needs_cast", "positions_of"]

# What a call wrote in a module: to a buffer, as a count or a queue; or what half precision would stop, as an average of
# weights.
Written = Literal["buffer", "average"]


class Position(NamedTuple):
    """Where something stands that calls cast: under which name in which dict of a module."""

    module: nn.Module
    holder: dict[str, Any]
    name: str
    kind: Literal["weight", "buffer", "rnn list", "beside"]


def positions_of(module: nn.Module, dtype: torch.dtype) -> list[Position]:
    """Return the positions of one module whose tensors a call casts."""
    named = module._parameters.items()
    weights = [Position(module, module._parameters, name, "weight") for name, each in named if needs_cast(each, dtype)]
    return [*_lists_of(module), *weights, *_buffers_of(module, dtype)]


def _lists_of(module: nn.Module) -> Iterator[Position]:
    """Yield where a module has its weights by other attributes, too."""
    own = vars(module)
    if isinstance(module, nn.RNNBase):
        # It sees that its weights are others, and lists them again.
        yield from (Position(module, own, name, "rnn list") for name in _RNN_LISTS)
        return
    # As a tied decoder that was handed the encoder's weight in a tuple.
    for name, value in own.items():
        if name not in _OWN_DICTS and _holds_weights(value):
            yield Position(module, own, name, "beside")


def _buffers_of(module: nn.Module, dtype: torch.dtype) -> Iterator[Position]:
    """Yield where a module has buffers that a call casts, or may make.

    Those of a module without weights keep their precision, as the frequencies of rotary positions need it.
    """
    has_weights = next(module.parameters(), None) is not None
    for name, tensor in module._buffers.items():
        # One that is None may be made by a call; those of a norm without statistics are not.
        may_be_made = tensor is None and not isinstance(module, _NormBase)
        if may_be_made or (has_weights and needs_cast(tensor, dtype)):
            yield Position(module, module._buffers, name, "buffer")


_RNN_LISTS = ("_flat_weights", "_flat_weight_refs")
_OWN_DICTS = ("_parameters", "_buffers", "_modules")


def _holds_weights(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_holds_weights, value))
    if type(value) is dict:
        return any(map(_holds_weights, value.values()))
    return isinstance(value, nn.Parameter)


class HalfCall:
    """A call that is under way: ``HalfForward`` begins it at the module's pre-hook and ends it at its hook.

    From ``begin`` to ``end`` half copies stand in the positions of float32 tensors; ``end`` puts these back, whatever
    happened in between, and lets them take what the call wrote to the copies. Version counters tell what it wrote, but
    not what it wrote through ``.data``: a call that ``compares`` looks at the values.

    What was cast at a border is remembered until the end, so that a module that stays float32, or who gets the output,
    is given the very tensor that was cast, and not what rounding left of it.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, casts_output: bool, compares: bool, autocast: Any
    ) -> None:
        # A number, which torch.compile, as it traces the hooks of inner calls, can follow better than a module.
        self.module_id = id(module)
        self.casts_output = casts_output
        self.recursions = 0  # calls of the module within its own call
        self._dtype = dtype
        self._compares = compares
        self._autocast = autocast
        self._swaps: list[tuple[Position, Any, Any]] = []
        self._addresses: dict[int, int | None] = {}  # of half copies, by their ids, if it compares
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}  # by id of a half tensor: it, and what it was cast from

    def begin(self, positions: Iterable[Position], copies: Copies) -> None:
        """Put half copies into the positions."""
        self._autocast.__enter__()
        keep = torch.is_grad_enabled()
        for position in positions:
            _, holder, name, kind = position
            wide = holder.get(name)
            half = copies.of(wide, keep=keep) if kind in ("weight", "buffer") else copies.of_list(wide, kind, keep=keep)
            if half is not wide:
                holder[name] = half
                if self._compares:
                    self._addresses[id(half)] = _address_of(half)
            if half is not wide or kind == "rnn list" or (wide is None and kind == "buffer"):
                self._swaps.append((position, wide, half))

    def end(self, copies: Copies) -> dict[nn.Module, Written]:
        """End the call; returns the modules that it wrote to, with what it wrote there."""
        self._autocast.__exit__(None, None, None)
        swaps, self._swaps = self._swaps, []
        self._originals.clear()
        written: dict[nn.Module, Written] = {}
        for position, wide, half in reversed(swaps):
            if position.kind in ("rnn list", "beside"):
                if position.kind == "rnn list":
                    copies.keep_list(wide, position.holder.get(position.name))
                position.holder[position.name] = wide
                continue
            what = self._put_back(position, wide, half)
            if what is not None and written.get(position.module) != "average":
                written[position.module] = what
        return written

    def wide_tensors(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of a module that hold half copies now, with float32 tensors in them."""
        own = vars(module)
        shown: dict[str, Any] = {}
        for (owner, holder, name, _), wide, _ in self._swaps:
            if owner is not module:
                continue
            if holder is own:
                shown[name] = wide
            else:
                attribute = "_parameters" if holder is module._parameters else "_buffers"
                shown.setdefault(attribute, dict(holder))[name] = wide
        return shown

    # Borders

    def cast_input(self, value: Any) -> Any:
        """Cast what enters the network to half."""
        return map_tensors(value, self.narrow)

    def narrow(self, tensor: Tensor) -> Tensor:
        """Return a floating tensor in half, and remember what it was."""
        if not tensor.is_floating_point() or tensor.dtype is self._dtype:
            return tensor
        half = tensor.to(self._dtype)
        if not torch.compiler.is_compiling():  # whose graphs know no ids
            self._originals[id(half)] = half, tensor
        return half

    def original(self, tensor: Tensor) -> Tensor:
        """Return the very tensor that was cast to this one at a border of this call, else the tensor itself."""
        if torch.compiler.is_compiling() or not self._originals:
            return tensor
        return self._originals.get(id(tensor), (tensor, tensor))[1]

    # What a call wrote

    def _put_back(self, position: Position, wide: Tensor | None, half: Tensor | None) -> Written | None:
        """Let a float32 tensor take its position again; returns what was written to it, if it may add up."""
        module, holder, name, kind = position
        now, by_data = holder.get(name), False
        if wide is None or half is None:  # a buffer that there was none of before the call
            return self._widen_made(position, now)
        # The copy stands there still, written to or not; or the module has put another buffer there; or something else,
        # which stays.
        if now is half:
            holder[name] = wide
            if not _was_written(position, half):
                by_data = self._differs(position, wide, half)
                if not by_data:
                    return None
            _take_changes(wide, half)
        elif _is_new_buffer(now, half.dtype):
            holder[name] = now.detach().to(wide.dtype)
        else:
            return None
        # A weight without gradients that changes is an average of others, as in a momentum encoder. What is written
        # through ``.data`` may be one too.
        if by_data or (kind == "weight" and not wide.requires_grad):
            return "average"
        return "buffer" if kind == "buffer" and not is_affine_batch_norm(module) else None

    def _widen_made(self, position: Position, made: Any) -> Written | None:
        """Bring a buffer that the call has made to float32."""
        if not any(_is_new_buffer(made, dtype) for dtype in HALF_DTYPES):
            return None
        position.holder[position.name] = made.detach().float()
        return "buffer"

    def _differs(self, position: Position, wide: Tensor, half: Tensor) -> bool:
        """Tell whether a call that compares wrote to a half copy through ``.data``, or set it; waits for the device."""
        address = self._addresses.get(id(half))
        if address is None:
            return False
        is_set = half.data_ptr() != address
        if is_set and not isinstance(position.module, nn.RNNBase):  # which flattens its weights so
            return True
        return not torch.allclose(wide.to(half.dtype), half, rtol=0.0, atol=0.0, equal_nan=True)


class Copies:
    """The half copies of weights; ``HalfForward`` has one of these, and clears it after backward passes and steps.

    In between, a weight that has not changed has the same copy in all calls, so that it is cast once.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # By id of a weight, because Python hashes a tensor ten times slower: it, what it was like, and its half copy.
        # So too the lists in which a recurrent network keeps its weights, flattened for cuDNN.
        self._kept: dict[int, tuple[Any, Any, Any]] = {}

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()

    def of(self, wide: Any, *, keep: bool) -> Any:
        """Return what takes the position of a tensor: itself if there is nothing to cast."""
        if not needs_cast(wide, self.dtype):
            return wide
        # What torch.func puts in place of a weight is cast with its graph, and not kept: it is of this call alone.
        # Without gradients none is kept: what writes to ``weight.data`` between two evaluations, as the swap for
        # averaged weights, leaves the version as it is.
        if not keep or not isinstance(wide, nn.Parameter):
            return self._cast(wide)
        # The address changes where somebody assigns to ``weight.data``, which leaves the version as it is.
        state = (0 if wide.is_inference() else wide._version, wide.data_ptr(), wide.requires_grad)
        _, made_of, half = self._kept.get(id(wide), (None, None, None))
        if half is None or made_of != state:
            half = self._cast(wide)
            self._kept[id(wide)] = wide, state, half
        return half

    def _cast(self, wide: Tensor) -> Tensor:
        return wide.to(self.dtype)  # in one line, because jit.trace compares where operations come from

    def of_list(self, wide: Any, kind: str, *, keep: bool) -> Any:
        """Return what takes the position of lists of weights.

        A recurrent network keeps its weights in a list too. While a call runs, the list of half weights of the last
        call stands in its place, so that they are not flattened again; it makes another one if they changed.
        """
        if kind == "rnn list":
            return self._kept.get(id(wide), (wide, None, wide))[2]
        return map_tensors(wide, lambda each: self.of(each, keep=keep) if isinstance(each, nn.Parameter) else each)

    def keep_list(self, wide: Any, half: Any) -> None:
        """Keep the list that a call has left in a recurrent network, for the next one."""
        if half is not wide and torch.is_grad_enabled():
            self._kept[id(wide)] = wide, None, half


def needs_cast(tensor: Tensor | None, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Tell whether a call casts a tensor: a floating one that is not in half, of whichever dtype, already."""
    return tensor is not None and tensor.is_floating_point() and tensor.dtype not in (dtype, *HALF_DTYPES)


def is_affine_batch_norm(module: nn.Module) -> bool:
    """Tell whether a module is a batch norm with weights, whose float32 ``keep_batchnorm_fp32`` keeps."""
    return isinstance(module, _BatchNorm) and module.affine


def _was_written(position: Position, half: Tensor) -> bool:
    # Flattening for cuDNN counts as a change, and batch norm's kernel does not count its changes.
    if half.is_inference() or (position.kind == "weight" and isinstance(position.module, nn.RNNBase)):
        return False
    return half._version > 0 or (position.kind == "buffer" and isinstance(position.module, _NormBase))


def _address_of(tensor: Any) -> int | None:
    """Return where a tensor's numbers are; ``None`` for what stands in for one, as in an export or under torch.func."""
    try:
        return tensor.data_ptr() if type(tensor) is Tensor else None
    except RuntimeError:  # how torch says that it has none
        return None


def _is_new_buffer(now: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.dtype is dtype and not isinstance(now, nn.Parameter)


@torch.no_grad()
def _take_changes(wide: Tensor, half: Tensor) -> None:
    """Let a float32 tensor take the entries that a module has changed in its half copy; the others stay exact.

    Through ``data``, which leaves its version as it is: the copy stays valid, and so does what autograd has saved.
    """
    wide.data.copy_(torch.where(wide.to(half.dtype) == half, wide, half.to(wide.dtype)))
