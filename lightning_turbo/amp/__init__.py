"""O0-O3 for any torch loop, with the calls of NVIDIA apex.amp and nothing of torch patched."""

from typing import NoReturn

from lightning_turbo.amp.apex_api import (
    disable_casts,
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    shutdown,
    state_dict,
)
from lightning_turbo.amp.registration import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "state_dict",
]

# What scripts take from apex beyond its documented calls, and what to write in its place.
_INSTEAD = {
    "_amp_state": (
        'amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 0}}) to set a scale, '
        'amp.state_dict()["loss_scaler0"]["loss_scale"] to read it, and amp.shutdown() for handle._deactivate()'
    ),
    "lists": 'amp.register_half_function(torch.nn.functional, "softmax") and its like, before amp.initialize',
    "init": 'amp.initialize(model, optimizer, opt_level="O1")',
}


def __getattr__(name: str) -> NoReturn:
    if name in _INSTEAD:
        raise AttributeError(f"amp.{name} is apex's and does not exist here. Write {_INSTEAD[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
