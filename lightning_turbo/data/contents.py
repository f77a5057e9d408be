"""What a dataset holds: found by pickling it into nothing, without its data."""

from __future__ import annotations

import pickle
import random
import types
from typing import Any

import numpy as np
import torch

__all__ = ["Contents"]

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_DATA = (torch.Tensor, np.ndarray, str, bytes, int, float, type, types.FunctionType, types.ModuleType)


class Contents(pickle.Pickler):
    """Walks through an object as pickle does, past its data, functions and classes.

    Attributes:
        generators: The random generators of its own that it leads to.
        error: Why it cannot be pickled, as it holds something of this process such as an open file; ``None`` if it can.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(self)
        self.generators: list[Any] = []
        self.error: Exception | None = None
        try:
            self.dump(owner)
        except Exception as error:
            self.error = error

    def write(self, data: Any) -> int:
        """Throw data away."""
        return len(data)

    def persistent_id(self, obj: Any) -> str | None:
        """Leave out data, and generators, which are kept."""
        if isinstance(obj, _GENERATORS):
            self.generators.append(obj)
            return "generator"
        return "data" if isinstance(obj, _DATA) else None

    def states(self) -> list[bytes]:
        """Return the states of the generators, as they are now."""
        return [
            each.get_state().numpy().tobytes() if isinstance(each, torch.Generator) else pickle.dumps(each)
            for each in self.generators
        ]
