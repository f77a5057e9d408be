"""The structure of a sample: tuples, lists and dictionaries in which field names stand for the parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_turbo._checks import expect

__all__ = ["WholeBatch", "build", "from_json", "names_in", "split_batch", "to_json"]

# JSON has one type of sequence, which stands for tuples, and dictionaries with string keys only.
LIST, DICT = "<list>", "<dict>"


def to_json(structure: Any) -> Any:
    """Return a structure as values that JSON preserves."""
    if isinstance(structure, dict):
        parts = [[key, to_json(part)] for key, part in structure.items()]
        plain = all(isinstance(key, str) for key in structure) and not {LIST, DICT} & set(structure)
        return dict(parts) if plain else {DICT: parts}
    if isinstance(structure, (list, tuple)):
        found = [to_json(part) for part in structure]
        return {LIST: found} if isinstance(structure, list) else found
    return structure


def from_json(value: Any) -> Any:
    """Return the structure encoded by ``to_json``."""
    if isinstance(value, list):
        return tuple(from_json(part) for part in value)
    if isinstance(value, dict):
        if LIST in value:
            return [from_json(part) for part in value[LIST]]
        return {key: from_json(part) for key, part in value.get(DICT, value.items())}
    return value


def build(structure: Any, parts: Mapping[str, Any]) -> Any:
    """Return a structure with each name replaced by its part."""
    if isinstance(structure, Mapping):
        return {key: build(part, parts) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(build(part, parts) for part in structure)
    return parts[structure]


def names_in(structure: Any) -> list[str]:
    """Return the names in a structure, in order."""
    if isinstance(structure, str):
        return [structure]
    expect(isinstance(structure, (Mapping, list, tuple)), "keys", structure, "names of fields", TypeError)
    parts = structure.values() if isinstance(structure, Mapping) else structure
    return [name for part in parts for name in names_in(part)]


def split_batch(batch: Any, rows: int) -> Iterable[Any]:
    """Split a batch into ``rows`` samples of the same structure."""
    if isinstance(batch, Mapping):
        return [dict(zip(batch, row, strict=True)) for row in split_batch(tuple(batch.values()), rows)]
    if isinstance(batch, (list, tuple)):
        make = getattr(batch, "_make", type(batch))
        columns = [split_batch(part, rows) for part in batch]
        return map(make, zip(*columns, strict=True)) if columns else [make(()) for _ in range(rows)]
    return batch


class WholeBatch(list[Any]):
    """The samples of a batch together with the batch whose rows they are, so that ``collate`` need not copy them.

    This is the one way to say so. A list derived from it, or one whose samples were replaced or modified since, has no
    batch. In another process it is a list, because the samples share no memory with the batch there.

    Args:
        samples: The samples.
        batch: What they are the rows of.
    """

    def __init__(self, samples: Iterable[Any], batch: Any) -> None:
        super().__init__(samples)
        self._batch = batch
        self._parts = [_parts_of(sample) for sample in self]

    @classmethod
    def of(cls, samples: list[Any]) -> Any:
        """Return the batch of which the samples are the rows, or ``None``."""
        # A tensor of a sample shares memory with the batch, so in-place changes to it reach the batch.
        if isinstance(samples, cls) and _are_same([_parts_of(sample) for sample in samples], samples._parts):
            return samples._batch
        return None

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _parts_of(value: Any) -> Any:
    """Return the containers of a sample as lists, with their types and keys."""
    if isinstance(value, Mapping):
        return [type(value), *value, *map(_parts_of, value.values())]
    return [type(value), *map(_parts_of, value)] if isinstance(value, (list, tuple)) else value


def _are_same(some: Any, others: Any) -> bool:
    """Return whether two nested lists hold the same objects."""
    if isinstance(some, list) and isinstance(others, list):
        return len(some) == len(others) and all(map(_are_same, some, others))
    return some is others
