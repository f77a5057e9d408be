"""One call of a network at O2 or O3: half copies replace float32 tensors, which are restored afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_turbo._pytree import map_tensors
from lightning_turbo.amp.levels import HALF_DTYPES

__all__ = ["Copies", "HalfCall", "Position", "Written", "is_affine_batch_norm", "needs_cast", "positions_of"]

# What a call wrote in a module: a buffer, such as a count or a queue, or something that half precision would freeze,
# such as an average of weights.
Written = Literal["buffer", "average"]


class Position(NamedTuple):
    """Where a tensor that calls cast is stored: module, dict and name."""

    module: nn.Module
    holder: dict[str, Any]
    name: str
    kind: Literal["weight", "buffer", "rnn list", "beside"]


def positions_of(module: nn.Module, dtype: torch.dtype) -> list[Position]:
    """Return the positions in one module whose tensors a call casts."""
    named = module._parameters.items()
    weights = [Position(module, module._parameters, name, "weight") for name, each in named if needs_cast(each, dtype)]
    return [*_lists_of(module), *weights, *_buffers_of(module, dtype)]


def _lists_of(module: nn.Module) -> Iterator[Position]:
    """Yield the positions of further attributes through which a module refers to weights."""
    own = vars(module)
    if isinstance(module, nn.RNNBase):
        # The module notices the replaced weights and rebuilds these lists.
        yield from (Position(module, own, name, "rnn list") for name in _RNN_LISTS)
        return
    yield from (Position(module, own, name, "beside") for name in attributes_with_weights(module))


def attributes_with_weights(module: nn.Module) -> list[str]:
    """Return the names of a module's other attributes that refer to weights, such as a tied decoder's tuple."""
    return [name for name, value in vars(module).items() if name not in _OWN_DICTS and _holds_weights(value)]


def _buffers_of(module: nn.Module, dtype: torch.dtype) -> Iterator[Position]:
    """Yield the positions of buffers that a call casts or may create.

    Buffers of a module without weights keep their precision: the frequencies of rotary embeddings, for example, need
    it.
    """
    has_weights = next(module.parameters(), None) is not None
    for name, tensor in module._buffers.items():
        # A call may create a buffer that is None, but not in a norm without statistics.
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
    """One call in progress, from the module's pre-hook to its hook; ``HalfForward`` begins and ends it.

    Between ``begin`` and ``end``, half copies replace float32 tensors. ``end`` restores the tensors, whatever has
    happened in between, and applies what the call wrote to the copies. Version counters show what was written, except
    through ``.data``: a call that ``compares`` also compares values.

    Tensors cast at a border are remembered until the end, so that a module that stays float32, or the recipient of the
    output, gets the original tensor and not a rounded one.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, casts_output: bool, compares: bool, autocast: Any
    ) -> None:
        # An id, because torch.compile traces comparisons of ids better than of modules when it follows inner hooks.
        self.module_id = id(module)
        self.casts_output = casts_output
        self.recursions = 0  # calls of the module inside its own call
        self._dtype = dtype
        self._compares = compares
        self._autocast = autocast
        self._swaps: list[tuple[Position, Any, Any]] = []
        self._addresses: dict[int, int | None] = {}  # addresses of half copies by id, if it compares
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}  # id of a half tensor -> it and its original

    def begin(self, positions: Iterable[Position], copies: Copies) -> None:
        """Replace the tensors at the positions with half copies."""
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

    def end(self, copies: Copies) -> list[tuple[nn.Module, Written]]:
        """End the call. Return the modules that it wrote to, with what it wrote there."""
        self._autocast.__exit__(None, None, None)
        swaps, self._swaps = self._swaps, []
        self._originals.clear()
        written: dict[int, tuple[nn.Module, Written]] = {}  # by id, as a module's hash may follow its state
        for position, wide, half in reversed(swaps):
            if position.kind in ("rnn list", "beside"):
                if position.kind == "rnn list":
                    copies.keep_list(wide, position.holder.get(position.name))
                position.holder[position.name] = wide
                continue
            what = self._put_back(position, wide, half)
            module = position.module
            if what is not None and written.get(id(module), (module, None))[1] != "average":
                written[id(module)] = module, what
        return [*written.values()]

    def wide_tensors(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of a module that now hold half copies, with the float32 tensors instead."""
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
        """Cast the inputs of the network to half."""
        return map_tensors(value, self.narrow)

    def narrow(self, tensor: Tensor) -> Tensor:
        """Return a floating-point tensor in half, and remember the original."""
        if not tensor.is_floating_point() or tensor.dtype is self._dtype:
            return tensor
        half = tensor.to(self._dtype)
        if not torch.compiler.is_compiling():  # ids mean nothing in a graph
            self._originals[id(half)] = half, tensor
        return half

    def original(self, tensor: Tensor) -> Tensor:
        """Return the tensor from which this one was cast at a border of this call, or the tensor itself."""
        if torch.compiler.is_compiling() or not self._originals:
            return tensor
        return self._originals.get(id(tensor), (tensor, tensor))[1]

    # What a call wrote

    def _put_back(self, position: Position, wide: Tensor | None, half: Tensor | None) -> Written | None:
        """Restore a float32 tensor. Return what was written to it, if that may accumulate."""
        module, holder, name, kind = position
        now = holder.get(name)
        by_data = False
        if wide is None or half is None:  # a buffer that did not exist before the call
            return self._widen_made(position, now)
        # The position holds the copy, written to or not; or a new buffer from the module; or something else, which
        # stays.
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
        """Cast a buffer that the call created to float32."""
        if not any(_is_new_buffer(made, dtype) for dtype in HALF_DTYPES):
            return None
        position.holder[position.name] = made.detach().float()
        return "buffer"

    def _differs(self, position: Position, wide: Tensor, half: Tensor) -> bool:
        """Return whether a comparing call wrote to a copy through ``.data``, or set ``.data``; synchronizes."""
        address = self._addresses.get(id(half))
        if address is None:
            return False
        is_set = half.data_ptr() != address
        if is_set and not isinstance(position.module, nn.RNNBase):  # an RNN sets it to flatten its weights
            return True
        return not torch.allclose(wide.to(half.dtype), half, rtol=0.0, atol=0.0, equal_nan=True)


class Copies:
    """A cache of the half copies of weights; ``HalfForward`` owns one and clears it after backward passes and steps.

    In between, an unchanged weight has the same copy in all calls, so that it is cast only once.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # Keyed by the id of a weight, because Python hashes tensors ten times slower: the weight, its state, its half
        # copy. It also holds the weight lists of recurrent networks, flattened for cuDNN.
        self._kept: dict[int, tuple[Any, Any, Any]] = {}

    def clear(self) -> None:
        """Drop all copies."""
        self._kept.clear()

    def of(self, wide: Any, *, keep: bool) -> Any:
        """Return the replacement of a tensor: the tensor itself if there is nothing to cast."""
        if not needs_cast(wide, self.dtype):
            return wide
        # A replacement by torch.func is cast within its graph and not cached, because it belongs to this call. Without
        # gradients nothing is cached: code that writes to ``weight.data`` between evaluations, such as a swap of
        # averaged weights, leaves the version counter unchanged.
        if not keep or not isinstance(wide, nn.Parameter):
            return self._cast(wide)
        # The address changes with an assignment to ``weight.data``, which leaves the version counter unchanged.
        state = (0 if wide.is_inference() else wide._version, wide.data_ptr(), wide.requires_grad)
        _, made_of, half = self._kept.get(id(wide), (None, None, None))
        if half is None or made_of != state:
            half = self._cast(wide)
            self._kept[id(wide)] = wide, state, half
        return half

    def _cast(self, wide: Tensor) -> Tensor:
        return wide.to(self.dtype)  # one line for all, because jit.trace compares source locations

    def of_list(self, wide: Any, kind: str, *, keep: bool) -> Any:
        """Return the replacement of a list of weights.

        A recurrent network also keeps its weights in a list. During a call, the list of half weights from the last call
        replaces it, so that they are not flattened again; the network rebuilds the list if the weights changed.
        """
        if kind == "rnn list":
            return self._kept.get(id(wide), (wide, None, wide))[2]
        return map_tensors(wide, lambda each: self.of(each, keep=keep) if isinstance(each, nn.Parameter) else each)

    def keep_list(self, wide: Any, half: Any) -> None:
        """Cache the list that a call left in a recurrent network, for the next call."""
        if half is not wide and torch.is_grad_enabled():
            self._kept[id(wide)] = wide, None, half


def needs_cast(tensor: Tensor | None, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Return whether a call casts a tensor: a floating-point one that is not half precision already."""
    return tensor is not None and tensor.is_floating_point() and tensor.dtype not in (dtype, *HALF_DTYPES)


def is_affine_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm with weights, which ``keep_batchnorm_fp32`` keeps in float32."""
    return isinstance(module, _BatchNorm) and module.affine


def _was_written(position: Position, half: Tensor) -> bool:
    # Flattening for cuDNN counts as a change, and the kernel of batch norm does not increase the version counter.
    if half.is_inference() or (position.kind == "weight" and isinstance(position.module, nn.RNNBase)):
        return False
    return half._version > 0 or (position.kind == "buffer" and isinstance(position.module, _NormBase))


def _address_of(tensor: Any) -> int | None:
    """Return the address of a tensor's data; ``None`` for a stand-in, such as in an export or under torch.func."""
    try:
        return tensor.data_ptr() if type(tensor) is Tensor else None
    except RuntimeError:  # torch raises this if there is no storage
        return None


def _is_new_buffer(now: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.dtype is dtype and not isinstance(now, nn.Parameter)


@torch.no_grad()
def _take_changes(wide: Tensor, half: Tensor) -> None:
    """Copy the entries that a module changed in a half copy to the float32 tensor; the others stay exact.

    Written through ``data``, which keeps the version counter: the copy and the tensors saved by autograd stay valid.
    """
    wide.data.copy_(torch.where(wide.to(half.dtype) == half, wide, half.to(wide.dtype)))
