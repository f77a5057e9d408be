"""The files of a packed folder: one memory-mapped file per field, with rows of any shape."""

from __future__ import annotations

import contextlib
import importlib
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_turbo._checks import expect
from lightning_turbo._optional import require

__all__ = ["Encoded", "RowWriter", "Rows", "encode_row", "open_rows", "read_row", "shape_at"]

HEADER = 256  # bytes before the first row of a file
TEXT = "text"  # stands for the dtype of a string
COMPRESSED = "z"  # prefix of the dtype of a row compressed with blosc2
SMALL = 1 << 16  # bytes; smaller rows are not compressed
AXES = 8  # the largest number of axes of a row
COLUMNS = 3 + AXES  # of the index: offset, size in bytes, dtype, and shape padded with -1
EXACT_UP_TO = 1 << 53  # float64 holds each integer up to this one


class Encoded(NamedTuple):
    """A row in its encoded form."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def encode_row(value: np.ndarray | str, compress: bool | Sequence[int] = False) -> Encoded:
    """Return the encoded bytes of a row; ``compress`` uses blosc2, with chunks of this size along the last axes."""
    if isinstance(value, str):
        data = value.encode()
        return Encoded(TEXT, (len(data),), data)
    expect(value.ndim <= AXES, "shape", value.shape, f"at most {AXES} axes")
    chunks = () if isinstance(compress, bool) else compress
    if compress is False or value.nbytes < SMALL or value.ndim < len(chunks):
        return Encoded(value.dtype.str, value.shape, value.tobytes())
    native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
    lengths = [*[1] * (value.ndim - len(chunks)), *chunks]
    options = {"chunks": tuple(map(min, lengths, value.shape))} if chunks else {}
    return Encoded(COMPRESSED + native.dtype.str, value.shape, bytes(_blosc2().asarray(native, **options).to_cframe()))


class RowWriter:
    """Appends samples to the files of a new folder.

    Files grow by appending, because space that is only reserved, such as mapped memory, kills the process on a full
    disk.

    Args:
        folder: An empty folder.

    Attributes:
        count: Number of samples written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self._closing = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._records: dict[str, array[int]] = {}  # the index of each field, one row after the other

    def append(self, row: Mapping[str, Encoded]) -> None:
        """Write a sample, which has the same fields as the first one."""
        for name in row if not self.count else ():
            self._files[name] = self._closing.enter_context((self.folder / f"{name}.npy").open("wb"))
            self._files[name].write(bytes(HEADER))
            self._records[name] = array("q")
        expect(row.keys() == self._files.keys(), "fields", list(row), f"those of the first sample, {list(self._files)}")
        for name, file in self._files.items():
            self._records[name].extend(_write(file, row[name]))
        self.count += 1

    def finish(self) -> None:
        """Write the headers. Rows of one shape and dtype become a plain array without an index."""
        self.close()  # Windows does not delete an open file
        for name in self._files:
            path = self.folder / f"{name}.npy"
            records = np.array(self._records[name], dtype="<i8").reshape(-1, COLUMNS)
            kind, shape = _kind_and_shape(records[0])
            plain = kind != TEXT and not kind.startswith(COMPRESSED) and bool((records[:, 1:] == records[0, 1:]).all())
            _write_header(path, *((kind, (self.count, *shape)) if plain else ("|u1", _end(records))))
            if not plain:
                with path.with_suffix(".index").open("wb") as file:
                    np.save(file, records)
                _check_whole_numbers(name, Rows(path))

    def close(self) -> None:
        """Close the files. Repeated calls have no effect."""
        self._closing.close()


def _write(file: Any, row: Encoded) -> list[int]:
    """Write a row, and return its record in the index."""
    begin = file.tell() - HEADER
    # A row with a wider dtype than the one before must be aligned to its item size.
    gap = 0 if row.kind == TEXT else -begin % np.dtype(row.kind.removeprefix(COMPRESSED)).itemsize
    file.write(bytes(gap))
    file.write(row.data)
    code = int.from_bytes(row.kind.encode(), "little")
    return [begin + gap, len(row.data), code, *row.shape, *[-1] * (AXES - len(row.shape))]


def _check_whole_numbers(name: str, rows: Rows) -> None:
    """Raise an error for an integer that the dtype of all rows, a floating-point one, cannot hold."""
    if rows.dtype is None or rows.dtype.kind not in "fc":
        return
    for row in range(len(rows)):
        whole = rows[row][...] if rows.kind_of(row) in ("i8", "u8") else np.zeros(0, np.int64)
        far = whole[np.abs(whole.astype(np.float64)) >= EXACT_UP_TO]
        lost = [each for each in far.tolist() if complex(rows.dtype.type(each)).real != each]
        what = f"integers that {rows.dtype}, the dtype of all rows together, can hold"
        expect(not lost, f"{name} of row {row}", lost[:1], what)


def _end(records: np.ndarray) -> tuple[int]:
    return (int(records[-1, :2].sum()),)


def _write_header(path: Path, descr: str, shape: tuple[int, ...]) -> None:
    """Write the header of a ``.npy`` file, format 1.0, into its reserved space."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape})
    with path.open("r+b") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", HEADER - 10) + text.ljust(HEADER - 11).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _kind_and_shape(record: np.ndarray) -> tuple[str, tuple[int, ...]]:
    _, _, code, *shape = record.tolist()
    return code.to_bytes(8, "little").rstrip(b"\0").decode(), tuple(length for length in shape if length >= 0)


class Rows:
    """The rows of a field that differ in shape or dtype, are compressed, or are strings.

    Attributes:
        dtype: The native dtype that can hold all rows; ``None`` for strings.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = np.load(path.with_suffix(".index"))
        self.bytes = np.load(path, mmap_mode="r")
        _, firsts = np.unique(self.index[:, 2], return_index=True)
        kinds = [_kind_and_shape(self.index[first])[0] for first in firsts]
        if any(kind.startswith(COMPRESSED) for kind in kinds):
            require("blosc2", f"{str(path)!r}, which is compressed,")
        dtypes = [kind.removeprefix(COMPRESSED) for kind in kinds]
        self.dtype = None if TEXT in kinds else np.result_type(*dtypes).newbyteorder("=")

    def __len__(self) -> int:
        return len(self.index)

    def kind_of(self, row: int) -> str:
        """Return the dtype of a row as it is stored, such as ``"i8"``, without its byte order."""
        return _kind_and_shape(self.index[row])[0].removeprefix(COMPRESSED)[1:]

    def __getitem__(self, row: int) -> Any:
        """Return a string, a view of the mapped file, or a compressed array, of which only slices are read."""
        begin, size = self.index[row, :2].tolist()
        kind, shape = _kind_and_shape(self.index[row])
        if kind == TEXT:
            return self.bytes[begin : begin + size].tobytes().decode()
        if not kind.startswith(COMPRESSED):
            return np.ndarray(shape, kind, buffer=self.bytes, offset=begin)
        return _blosc2().open(str(self.path), mode="r", offset=HEADER + begin, mmap_mode="r")


def _blosc2() -> Any:
    return importlib.import_module("blosc2")


def open_rows(path: Path) -> np.ndarray | Rows:
    """Map the rows of a field: an array if they have one shape and dtype."""
    # Nothing writes through the mapping, but torch warns about read-only arrays.
    return Rows(path) if path.with_suffix(".index").exists() else np.load(path, mmap_mode="c")


def shape_at(rows: np.ndarray | Rows, row: int) -> tuple[int, ...]:
    """Return the shape of a row without reading it."""
    return rows.shape[1:] if isinstance(rows, np.ndarray) else _kind_and_shape(rows.index[row])[1]


def read_row(rows: np.ndarray | Rows, row: int) -> Any:
    """Return a row as a new array in the native dtype of all rows, or a string."""
    value = rows[row]
    return value if rows.dtype is None else np.array(value[...], dtype=rows.dtype.newbyteorder("="))
