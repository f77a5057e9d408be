"""The class that inherits from ``PrefetchLoader`` and another class of loader; copies of loaders."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["blank", "copy_loader", "make_class", "merge_signatures", "refuse_added"]

# The arguments, and attributes, that PrefetchLoader adds to those of the class behind it.
ADDED = ("prefetch_batches", "threads", "transfer", "sample_seeds")


def copy_loader(loader: DataLoader[Any]) -> Any:
    """Return a copy of a loader with worker processes and records of its own; dataset and samplers are shared."""
    twin = copy.copy(loader)
    for name, value in vars(twin).items():
        # A Trainer keeps records of a loader in such lists.
        if isinstance(value, list) and name.startswith("__"):
            setattr(twin, name, list(value))
    twin._iterator = None
    return twin


def make_class(base: type[DataLoader[Any]], cls: type[DataLoader[Any]]) -> Any:
    """Return a class that inherits from ``base``, a ``PrefetchLoader``, and ``cls``, with the arguments of both.

    For the same two it is the same class, so that objects of it can be pickled, compared by class and built again.

    Raises:
        TypeError: If ``cls`` has one of the added arguments itself.
    """
    made = _made.get((base, cls))
    if made is None:
        refuse_added(cls, inspect.signature(cls.__init__).parameters)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            base.__init__(self, *args, **kwargs)

        __init__.__signature__ = merge_signatures(base, cls)
        made = type(f"Prefetch{cls.__name__}", (base, cls), {"__init__": __init__, "_behind_class": cls})
        made.__module__ = cls.__module__
        made.__doc__ = cls.__doc__
        _made[base, cls] = made
    return made


_made: dict[tuple[type, type], Any] = {}


def refuse_added(cls: type, names: Collection[str]) -> None:
    """Refuse a class of loader whose arguments or attributes have the name of one that ``PrefetchLoader`` adds."""
    for name in ADDED:
        if name in names:
            raise TypeError(
                f"expected a loader without an argument or attribute {name!r}, got {cls.__name__}, to which it means "
                "something else than to PrefetchLoader. Rename it, or inherit PrefetchLoader in front of a class "
                "without it."
            )


def merge_signatures(base: type, cls: type) -> inspect.Signature:
    """Return the arguments of both constructors, for Trainers that make a loader again by its signature."""
    own = inspect.signature(base.__init__).parameters
    theirs = list(inspect.signature(cls.__init__).parameters.values())
    takes_all = bool(theirs) and theirs[-1].kind is inspect.Parameter.VAR_KEYWORD
    end = len(theirs) - takes_all
    return inspect.Signature([*theirs[:end], *(own[name] for name in ADDED), *theirs[end:]])


def blank(base: type[DataLoader[Any]], behind: type[DataLoader[Any]]) -> Any:
    """Return a loader without attributes, of the class that ``make_class`` returns, for unpickling."""
    cls = make_class(base, behind)
    return cls.__new__(cls)
