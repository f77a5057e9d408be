"""O0-O3 for any torch loop, with the calls of NVIDIA apex.amp and nothing of torch patched."""

from lightning_turbo.amp.frontend import (
    disable_casts,
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    shutdown,
    state_dict,
)
from lightning_turbo.amp.functions import (
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
