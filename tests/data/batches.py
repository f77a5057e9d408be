"""Comparison of batches, to the last bit."""

import dataclasses

import numpy as np
import torch

__all__ = ["differences"]


def differences(one, two, path="batch"):
    """What differs between two batches: a list of places, empty if they are equal in structure, types and bits."""
    if type(one) is not type(two):
        return [f"{path}: {type(one).__name__} and {type(two).__name__}"]
    if isinstance(one, torch.Tensor):
        return _of_tensors(one, two, path)
    if isinstance(one, np.ndarray):
        same = one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
        return [] if same else [f"{path}: arrays"]
    if isinstance(one, dict):
        if list(one) != list(two):
            return [f"{path}: keys {list(one)} and {list(two)}"]
        return [found for key in one for found in differences(one[key], two[key], f"{path}[{key!r}]")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return [f"{path}: {len(one)} and {len(two)} parts"]
        parts = enumerate(zip(one, two, strict=True))
        return [found for n, (left, right) in parts for found in differences(left, right, f"{path}[{n}]")]
    if dataclasses.is_dataclass(one):
        return differences(vars(one), vars(two), path)
    return [] if one is two or one == two else [f"{path}: {one!r} and {two!r}"]


def _of_tensors(one, two, path):
    found = [
        f"{path}.{name}: {left} and {right}"
        for name in ("dtype", "shape", "layout", "requires_grad", "is_quantized")
        if (left := getattr(one, name)) != (right := getattr(two, name))
    ]
    if found:
        return found
    if one.is_quantized:
        return differences(one.int_repr(), two.int_repr(), path)
    if one.layout is not torch.strided:
        return differences(one.to_dense(), two.to_dense(), path)
    if one.is_conj() != two.is_conj() or one.is_neg() != two.is_neg():
        return [f"{path}: conj or neg"]
    if one.stride() != two.stride():
        return [f"{path}: strides {one.stride()} and {two.stride()}"]
    rows = [torch.empty(each.shape, dtype=each.dtype).copy_(each.detach()) for each in (one, two)]
    return [] if torch.equal(*(each.flatten().view(torch.uint8) for each in rows)) else [f"{path}: values"]
