"""Parameter groups with equal options become one, before the optimizer is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_turbo._checks import expect

__all__ = ["merge_param_groups"]

NOT_OPTIONS = ("params", "param_names", "name")


def merge_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return fewer parameter groups: those with equal options become one.

    The fused and foreach kernels of torch's optimizers take all parameters of a group at once. A group for each
    parameter, as recipes with a learning rate that decays by layer make them, calls these kernels once a parameter.

    Args:
        groups: What the optimizer would be given: dictionaries with ``"params"`` (a tensor, or some tensors, or pairs
            of a name and a tensor) and options. Options are equal if they are numbers, texts, truth values, ``None``,
            or tuples and lists of these that are equal; anything else, as a learning rate in a tensor, has to be the
            same object. A group that lacks an option is not equal to one that has it.

    Returns:
        New groups in the order in which their options come first. Their parameters keep their order, and
        ``"param_names"`` theirs; ``"name"`` is that of the first group. What was given is not changed.

    Raises:
        TypeError: If ``groups`` are not dictionaries with ``"params"``.
        ValueError: If a parameter is in two groups.

    Note:
        The weights are the same bit for bit with each optimizer whose update of a parameter looks at nothing else of
        its group: ``SGD``, ``Adam``, ``AdamW``, ``Adamax``, ``NAdam``, ``RAdam``, ``Adagrad``, ``Adadelta``,
        ``RMSprop``, ``Rprop`` and ``ASGD`` of torch. It is not so with ``LBFGS``, nor where a norm is taken over the
        group. Schedules see fewer groups, with the same learning rates; a schedule with one value for each group needs
        one for each merged one. A state of the optimizer from before has the groups from before: the card says how it
        is taken over.

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
    """Return the parameter itself of a pair of its name and it."""
    return param[1] if isinstance(param, tuple) else param


def _are_equal(merged: Mapping[str, Any], group: Mapping[str, Any], params: Sequence[Any]) -> bool:
    """Tell whether a group can become a part of a merged one."""
    named = [isinstance(each, tuple) for each in (*merged["params"][:1], *params[:1])]  # torch takes all or none
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
        return False  # True is 1 to Python, and something else to an optimizer
    return isinstance(one, (int, float, str)) and isinstance(two, (int, float, str)) and one == two
