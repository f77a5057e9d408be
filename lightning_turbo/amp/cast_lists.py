"""apex's lists of functions for O1, by namespace: names only.

What is done with them is in ``autocast.py``. Source: the lists of NVIDIA apex.amp, as recorded in
``tests/recorded/apex/o1_cast_table.json``.
"""

from __future__ import annotations

__all__ = [
    "BANNED",
    "FLOAT",
    "HALF",
    "HALF_IN_AUTOCAST",
    "LEFT_ALONE",
    "LEFT_ALONE_IF_ALIKE",
    "LOOKED_INTO",
    "MATCH_SELF",
    "NOT_IN_PLACE",
    "PROMOTE",
]

_LOSSES = [
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss",
]  # fmt: skip
_POINTWISE = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "pow", "reciprocal", "rsqrt",
    "sinh", "tan",
]  # fmt: skip
_REDUCTIONS = ["cumprod", "cumsum", "dist", "norm", "prod", "renorm", "std", "sum", "var"]
_PRODUCTS = ["addmv", "addr", "mv", "prelu"]
_AUTOCAST_PRODUCTS = ["addbmm", "addmm", "baddbmm", "bmm", "matmul", "mm"]
_CONVOLUTIONS = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

# Floating arguments become half precision.
HALF: dict[str, list[str]] = {
    "torch": ["conv_tbc", *_PRODUCTS, "gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"],
    "torch.nn.functional": ["conv_tbc"],
    "torch.Tensor": _PRODUCTS,
}

# The same, but autocast casts these itself; only float64 is left for us.
HALF_IN_AUTOCAST: dict[str, list[str]] = {
    "torch": [*_CONVOLUTIONS, *_AUTOCAST_PRODUCTS],
    "torch.nn.functional": [*_CONVOLUTIONS, "linear"],
    "torch.Tensor": [*_AUTOCAST_PRODUCTS, "__matmul__", "__rmatmul__"],
}

# Floating arguments become float32.
FLOAT: dict[str, list[str]] = {
    "torch": [*_POINTWISE, *_REDUCTIONS],
    "torch.nn.functional": [
        *_LOSSES, "cosine_similarity", "gelu", "grid_sample", "group_norm", "interpolate", "layer_norm",
        "local_response_norm", "log_softmax", "normalize", "softmax", "softmin", "softplus",
    ],
    "torch.Tensor": [
        *_POINTWISE, *_REDUCTIONS, "__ipow__", "__pow__", "__rdiv__", "__rpow__", "__rtruediv__",
        "cpu",
    ],
}  # fmt: skip

# Floating arguments of different dtypes become the widest of them. torch promotes most of apex's list by itself;
# these are the functions that it does not promote.
PROMOTE: dict[str, list[str]] = {
    "torch": ["addcdiv", "addcmul", "bilinear", "cat", "cross", "dot", "equal", "stack", "vdot"],
    "torch.nn.functional": ["bilinear"],
    "torch.Tensor": ["addcdiv", "addcmul", "cross", "dot", "equal", "vdot"],
}

# In-place forms: the other floating arguments take the dtype of the tensor that is written to. torch does so by
# itself but for these.
MATCH_SELF: dict[str, list[str]] = {"torch.Tensor": ["addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_"]}

# Functions that autocast casts and apex left alone, as they are younger than its lists or escaped them.
LEFT_ALONE: dict[str, list[str]] = {
    "torch": ["log1p", "log_softmax", "softmax"],
    "torch.nn.functional": ["huber_loss"],
    "torch.Tensor": ["log1p", "log_softmax", "softmax"],
}
# The same, but for those that raise when dtypes are mixed, where autocast may bring them together.
LEFT_ALONE_IF_ALIKE: dict[str, list[str]] = {
    "torch": ["chain_matmul", "einsum", "inner", "layer_norm", "tensordot"],
    "torch.nn.functional": ["scaled_dot_product_attention"],
    "torch.Tensor": ["inner"],
    "torch.linalg": ["multi_dot"],
}

# Functions of functions: the lists hold for each call inside. The backward pass is one of them where activation
# checkpointing repeats forward passes in it.
LOOKED_INTO: dict[str, list[str]] = {
    "torch.nn.functional": ["multi_head_attention_forward"],
    "torch.Tensor": ["backward"],
    "torch.autograd": ["backward", "grad"],
}

# In-place forms of the float32 functions: a half tensor cannot take the float32 result.
_IN_PLACE = [
    "acos_", "asin_", "cosh_", "exp_", "expm1_", "log_", "log10_", "log2_", "reciprocal_", "rsqrt_", "sinh_", "tan_",
]  # fmt: skip
NOT_IN_PLACE: dict[str, list[str]] = {
    "torch": _IN_PLACE,
    "torch.Tensor": [*_IN_PLACE, "cumprod_", "cumsum_", "erfinv_", "pow_", "renorm_"],
}

# Functions that lose too much in half precision, and what to call instead.
BANNED: dict[str, dict[str, str]] = {
    "torch.nn.functional": {
        "binary_cross_entropy": "torch.nn.functional.binary_cross_entropy_with_logits (BCEWithLogitsLoss), which "
        "takes the logits before the sigmoid",
    },
}
