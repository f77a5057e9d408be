"""Files below a folder, and the classes that its subfolders are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

__all__ = ["check_classes", "find_classes", "list_files"]


def list_files(folder: str | os.PathLike[str], suffixes: Sequence[str]) -> list[Path]:
    """Return the files below a folder that end in one of ``suffixes``, sorted.

    Hidden files and folders (``.DS_Store``, ``.ipynb_checkpoints``) are passed over. Links to folders are followed,
    unless they lead to a folder that holds the link.
    """
    ends = tuple(suffixes)
    return sorted(path for path in _walk(Path(folder)) if path.name.lower().endswith(ends))


def find_classes(
    root: Path, suffixes: Sequence[str], classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], list[Path], list[int]]:
    """Return the classes of a folder with one subfolder a class, its files and the number of the class of each.

    Args:
        root: The folder.
        suffixes: How the files end, in lower case.
        classes: Names of the classes in the order of their numbers; by default the subfolders, sorted.

    Raises:
        ValueError: If there is a subfolder that is not in ``classes``, or, without them, one that holds no file.
    """
    names = _name_classes(root, classes)
    found = [list_files(root / name, suffixes) for name in names]
    if classes is None and [] in found:
        raise ValueError(
            f"The class {str(root / names[found.index([])])!r} holds no file that ends in {', '.join(suffixes)}. Fill "
            "the folder, remove it, or pass classes= with the names of all classes."
        )
    labels = np.repeat(np.arange(len(names)), [len(files) for files in found])
    return names, [file for files in found for file in files], labels.tolist()


def _name_classes(root: Path, classes: Sequence[str] | None) -> tuple[str, ...]:
    """Return ``classes``, or the subfolders of a folder, sorted."""
    folders = sorted(path.name for path in root.iterdir() if path.is_dir() and _is_wanted(path))
    names = tuple(folders if classes is None else classes)
    if unknown := set(folders) - set(names):
        raise ValueError(
            f"{str(root)!r} holds the folders {sorted(unknown)!r}, which are not in classes={names!r}. "
            "Add them to classes, in the training set too, or remove the folders."
        )
    return names


def check_classes(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return ``classes`` as a tuple.

    Raises:
        TypeError: If it is neither a sequence of names nor ``None``.
        ValueError: If it is empty or a name comes twice.
    """
    if classes is None:
        return None
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise TypeError(f"classes={classes!r}: expected a sequence of names, for example ('cat', 'dog'), or None.")
    if not classes or len(set(classes)) < len(classes):
        raise ValueError(f"classes={classes!r}: expected at least one name, and each only once.")
    return tuple(classes)


def _walk(folder: Path) -> Iterator[Path]:
    """Give every file below a folder that is not hidden."""
    for where, folders, names in os.walk(folder, followlinks=True):
        here = Path(where)
        folders[:] = [name for name in folders if _is_wanted(here / name)]
        yield from (here / name for name in names if not name.startswith("."))


def _is_wanted(folder: Path) -> bool:
    """Tell whether a folder is neither hidden nor a link to a folder above it, which would never end."""
    endless = folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())
    return not folder.name.startswith(".") and not endless
