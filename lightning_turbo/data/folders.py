"""Finds the files of a folder, and the classes that its subfolders define."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_turbo._checks import expect, is_list

__all__ = ["find_classes", "list_files"]


def list_files(folder: str | os.PathLike[str], suffixes: Sequence[str]) -> list[Path]:
    """Return the sorted files below a folder that end in one of ``suffixes``.

    Hidden files and folders (``.DS_Store``, ``.ipynb_checkpoints``) are skipped. Links to folders are followed, except
    to a parent of the link, which would never end.
    """
    found = []
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if _is_visible(Path(root, name))]
        found += [Path(root, name) for name in names if _is_file(name, suffixes)]
    return sorted(found)


def _is_file(name: str, suffixes: Sequence[str]) -> bool:
    return not name.startswith(".") and name.lower().endswith(tuple(suffixes))


def find_classes(
    root: Path, suffixes: Sequence[str], classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], list[Path], list[int]]:
    """Return the classes of a folder with one subfolder per class, its files and their labels.

    Args:
        root: The folder.
        suffixes: Lower-case suffixes of the files.
        classes: Class names in the order of their labels. Default: the sorted subfolders.

    Raises:
        TypeError: If ``classes`` is not a sequence of names.
        ValueError: If a subfolder is not in ``classes``, or, without ``classes``, if a subfolder has no file.
    """
    folders = [path.name for path in sorted(filter(_is_visible, root.iterdir()))]
    names = tuple(folders if classes is None else _check_classes(classes))
    if unknown := sorted(set(folders) - set(names)):
        raise ValueError(
            f"classes: expected all subfolders of {str(root)!r}, got {names!r} without {unknown!r}. Add them to "
            "classes, for the training set too, or remove the folders."
        )
    found = [list_files(root / name, suffixes) for name in names]
    if classes is None and [] in found:
        raise ValueError(
            f"Found no file ({', '.join(suffixes)}) of class {str(root / names[found.index([])])!r}. Remove the "
            "folder, or pass classes= with the names of all classes."
        )
    labels = np.repeat(np.arange(len(names)), list(map(len, found)))
    return names, list(itertools.chain(*found)), labels.tolist()


def _check_classes(classes: Sequence[str]) -> Sequence[str]:
    what = "a sequence of names such as ('cat', 'dog'), or None"
    expect(is_list(classes), "classes", classes, what, TypeError)
    expect(0 < len(set(classes)) == len(classes), "classes", classes, "at least one name, and each name once")
    return classes


def _is_visible(path: Path) -> bool:
    """Return whether this is a folder that is neither hidden nor a link to one of its parents."""
    hidden = path.name.startswith(".") or path.parent.resolve().is_relative_to(path.resolve())
    return path.is_dir() and not hidden
