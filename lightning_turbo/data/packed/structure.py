"""The structure of a sample: tuples, lists and dictionaries with the name of a field in the place of each part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_turbo._checks import expect

__all__ = ["WholeBatch", "build", "from_json", "names_in", "split_batch", "to_json"]

# JSON has one kind of sequence, which stands for a tuple, and dictionaries whose keys are strings.
LIST, DICT = "<list>", "<dict>"


def to_json(structure: Any) -> Any:
    """Return a structure in values that JSON keeps."""
    if isinstance(structure, dict):
        parts = [[key, to_json(part)] for key, part in structure.items()]
        plain = all(isinstance(key, str) for key in structure) and not {LIST, DICT} & set(structure)
        return dict(parts) if plain else {DICT: parts}
    if isinstance(structure, (list, tuple)):
        found = [to_json(part) for part in structure]
        return {LIST: found} if isinstance(structure, list) else found
    return structure


def from_json(value: Any) -> Any:
    """Return the structure that ``to_json`` described."""
    if isinstance(value, list):
        return tuple(from_json(part) for part in value)
    if isinstance(value, dict):
        if LIST in value:
            return [from_json(part) for part in value[LIST]]
        return {key: from_json(part) for key, part in value.get(DICT, value.items())}
    return value


def build(structure: Any, parts: Mapping[str, Any]) -> Any:
    """Return a structure with the part of each name in its place."""
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
    """Split a batch into so many samples of the same structure."""
    if isinstance(batch, Mapping):
        return [dict(zip(batch, row, strict=True)) for row in split_batch(tuple(batch.values()), rows)]
    if isinstance(batch, (list, tuple)):
        make = getattr(batch, "_make", type(batch))
        columns = [split_batch(part, rows) for part in batch]
        return map(make, zip(*columns, strict=True)) if columns else [make(()) for _ in range(rows)]
    return batch


class WholeBatch(list[Any]):
    """The samples of a batch together with the batch that they were split from.

    A list that is derived from it, or whose samples were replaced or changed since, has none.
    """

    _batch: Any = None
    _parts: Any = None

    @classmethod
    def split(cls, batch: Any, rows: int) -> WholeBatch:
        """Return the samples of a batch of so many rows."""
        samples = cls(split_batch(batch, rows))
        samples._batch = batch
        samples._parts = [_parts_of(sample) for sample in samples]
        return samples

    @classmethod
    def of(cls, samples: list[Any]) -> Any:
        """Return the batch that samples are the rows of, or ``None``."""
        # What is written into a tensor of a sample is written into the batch, whose memory it shares.
        if isinstance(samples, cls) and _are_same([_parts_of(sample) for sample in samples], samples._parts):
            return samples._batch
        return None

    def __reduce__(self) -> Any:
        return list, (list(self),)  # in another process they share no memory with the batch


def _parts_of(value: Any) -> Any:
    """Return the containers of a sample as lists, with their kinds and keys."""
    if isinstance(value, Mapping):
        return [type(value), *value, *map(_parts_of, value.values())]
    return [type(value), *map(_parts_of, value)] if isinstance(value, (list, tuple)) else value


def _are_same(some: Any, others: Any) -> bool:
    """Return whether two nested lists hold the same objects."""
    if isinstance(some, list) and isinstance(others, list):
        return len(some) == len(others) and all(map(_are_same, some, others))
    return some is others
