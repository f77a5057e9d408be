"""Merges parameter groups with equal options before the optimizer is created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_turbo._checks import expect

__all__ = ["merge_param_groups"]

NOT_OPTIONS = ("params", "param_names", "name")


def merge_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return fewer parameter groups by merging those with equal options.

    The fused and foreach kernels of torch's optimizers process all parameters of a group at once. With one group per
    parameter, as created by recipes for layer-wise learning rate decay, these kernels run once per parameter.

    Args:
        groups: The groups for the optimizer: dictionaries with ``"params"`` (a tensor, several tensors, or pairs of a
            name and a tensor) and options. Options are equal if they are equal numbers, strings, bools, ``None``, or
            tuples and lists of these; any other option, such as a learning rate in a tensor, must be the same object. A
            group that lacks an option differs from one that has it.

    Returns:
        New groups in order of first occurrence. Parameters and ``"param_names"`` keep their order; ``"name"`` is that
        of the first group. The arguments are not modified.

    Raises:
        TypeError: If ``groups`` contains anything but dictionaries with ``"params"``.
        ValueError: If a parameter occurs in two groups.

    Note:
        The weights are bitwise equal with every optimizer whose update of a parameter uses nothing else from its group:
        torch's ``SGD``, ``Adam``, ``AdamW``, ``Adamax``, ``NAdam``, ``RAdam``, ``Adagrad``, ``Adadelta``, ``RMSprop``,
        ``Rprop`` and ``ASGD``. This is not the case with ``LBFGS``, or if a norm is taken over the group. Schedulers
        see fewer groups, with the same learning rates; a scheduler with one value per group needs one per merged group.
        An optimizer state saved before merging has the old groups: the card says how to convert it.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        >>> groups = [{"params": p, "weight_decay": 0.0 if p.ndim == 1 else 0.01} for p in net.parameters()]
        >>> [len(group["params"]) for group in merge_param_groups(groups)]
        [2, 2]

    Source: roboflow/rf-detr, pull request 1409.
    """
    merged: list[dict[str, Any]] = []
    seen: set[int] = set()
    for group in groups:
        expect(
            isinstance(group, Mapping) and "params" in group, "groups", group, "dictionaries with 'params'", TypeError
        )
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for each in map(_tensor, params):
            expect(id(each) not in seen, "groups", f"one of shape {tuple(each.shape)} twice", "each parameter once")
            seen.add(id(each))
        alike = next((each for each in merged if _are_equal(each, group, params)), None)
        if alike is None:
            merged.append({**group, "params": params})
        else:
            alike["params"] += params
            if "param_names" in group:
                alike["param_names"] = [*alike["param_names"], *group["param_names"]]
    return merged


def _tensor(param: Any) -> Any:
    """Return the parameter from a (name, parameter) pair, or the parameter itself."""
    return param[1] if isinstance(param, tuple) else param


def _are_equal(merged: Mapping[str, Any], group: Mapping[str, Any], params: Sequence[Any]) -> bool:
    """Return whether a group can be added to a merged one."""
    named = [isinstance(each, tuple) for each in (*merged["params"][:1], *params[:1])]  # torch: all or none
    options = [{key: value for key, value in each.items() if key not in NOT_OPTIONS} for each in (merged, group)]
    return (
        len(set(named)) < 2
        and ("param_names" in merged) == ("param_names" in group)
        and options[0].keys() == options[1].keys()
        and all(_is_equal(value, options[1][key]) for key, value in options[0].items())
    )


def _is_equal(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if isinstance(one, (tuple, list)) and type(one) is type(two):
        return len(one) == len(two) and all(map(_is_equal, one, two))
    if isinstance(one, bool) or isinstance(two, bool):
        return False  # True equals 1 in Python, but not for an optimizer
    return isinstance(one, (int, float, str)) and isinstance(two, (int, float, str)) and one == two
