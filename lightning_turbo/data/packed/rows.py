"""The files of a packed folder: one memory-mapped file per field, with rows of any shape."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import struct
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
    """Appends samples to the files of a folder, and continues where an earlier writer was interrupted.

    The journal has a first line written by its owner, then one line per attempted sample: empty if the sample was
    written, otherwise the reason why not. The line is written last, so everything that the journal counts is complete;
    the rest of the other files is truncated. Files grow by appending, because space that is only reserved, such as
    mapped memory, kills the process on a full disk. ``close`` closes the files; the journal belongs to its owner.

    Attributes:
        done: Number of samples attempted.
        broken: Sample number -> reason why it was not written.
        count: Number of samples written.
    """

    def __init__(self, folder: Path, journal: Any) -> None:
        self.folder = folder
        self._journal = journal
        self._closing = contextlib.ExitStack()
        self._files: dict[str, tuple[Any, Any]] = {}
        journal.seek(0)
        lines = journal.read().splitlines(keepends=True)[1:]
        whole = [line for line in lines if line.endswith("\n")]
        journal.truncate(journal.tell() - sum(map(len, lines[len(whole) :])))
        self.broken: dict[int, str] = {n: json.loads(line) for n, line in enumerate(whole) if line != "\n"}
        self.done = len(whole)
        self.count = len(whole) - len(self.broken)
        for path in folder.glob("*.rows"):
            self._open(path.stem)

    def _open(self, name: str) -> None:
        """Open the files of a field, and truncate them to what the journal counts."""
        data, index = (self._closing.enter_context(self._path(name, suffix).open("ab")) for suffix in ("npy", "rows"))
        index.truncate(self.count * COLUMNS * 8)
        records = self._records(name)
        data.truncate(HEADER + int(records[-1, :2].sum() if len(records) else 0))
        data.seek(0, os.SEEK_END)
        self._files[name] = data, index

    def _path(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _records(self, name: str) -> np.ndarray:
        return np.fromfile(self._path(name, "rows"), dtype="<i8").reshape(-1, COLUMNS)

    def append(self, row: Mapping[str, Encoded] | str) -> None:
        """Write a sample with the same fields as the first one, or record what is wrong with it."""
        line = ""
        if isinstance(row, str):
            self.broken[self.done] = row
            line = json.dumps(row)
        else:
            for name in row if not self.count else ():
                if name not in self._files:
                    self._open(name)
            for name, (data, index) in self._files.items():
                _write(data, index, row[name])
            self.count += 1
        self._journal.write(f"{line}\n")
        self._journal.flush()
        self.done += 1

    def finish(self) -> None:
        """Write the headers. Rows of one shape and dtype become a plain array without an index.

        A field is finished once its ``.rows`` file is gone. After an interruption, the next writer finishes it.
        """
        self.close()  # Windows does not delete an open file
        for name in self._files:
            records = self._records(name)
            kind, shape = _kind_and_shape(records[0])
            plain = kind != TEXT and not kind.startswith(COMPRESSED) and bool((records[:, 1:] == records[0, 1:]).all())
            if not plain:
                with self._path(name, "index").open("wb") as file:
                    np.save(file, records)
            _write_header(self._path(name, "npy"), *((kind, (self.count, *shape)) if plain else ("|u1", _end(records))))
            self._path(name, "rows").unlink()

    def close(self) -> None:
        """Close the files. Repeated calls have no effect."""
        self._closing.close()


def _write(data: Any, index: Any, row: Encoded) -> None:
    begin = data.tell() - HEADER
    # A row with a wider dtype than the one before must be aligned to its item size.
    gap = 0 if row.kind == TEXT else -begin % np.dtype(row.kind.removeprefix(COMPRESSED)).itemsize
    # The row is written before its index entry, so everything in the index exists.
    data.write(bytes(gap))
    data.write(row.data)
    data.flush()
    code = int.from_bytes(row.kind.encode(), "little")
    filled = [*row.shape, *[-1] * (AXES - len(row.shape))]
    index.write(np.array([begin + gap, len(row.data), code, *filled], dtype="<i8").tobytes())
    index.flush()


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
