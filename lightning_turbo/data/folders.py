"""Find the files of a folder, and the classes that its subfolders name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_turbo._checks import expect

__all__ = ["find_classes", "list_files"]


def list_files(folder: str | os.PathLike[str], suffixes: Sequence[str]) -> list[Path]:
    """Return the sorted files below a folder that end in one of ``suffixes``.

    Hidden files and folders (``.DS_Store``, ``.ipynb_checkpoints``) are ignored. Links to folders are followed, except
    a link to one of its own parents, which would never end.
    """
    found = []
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if _is_visible(Path(root, name))]
        visible = (name for name in names if not name.startswith("."))
        found += [Path(root, name) for name in visible if name.lower().endswith(tuple(suffixes))]
    return sorted(found)


def find_classes(
    root: Path, suffixes: Sequence[str], classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], list[Path], list[int]]:
    """Return the classes of a folder with one subfolder per class, its files and their labels.

    Args:
        root: The folder.
        suffixes: Suffixes of the files in lower case.
        classes: Class names in the order of their labels. Default: the sorted subfolders.

    Raises:
        TypeError: If ``classes`` is not a sequence of names.
        ValueError: If a subfolder is not in ``classes``, or, without ``classes``, if a subfolder has no file.
    """
    folders = sorted(path.name for path in root.iterdir() if _is_visible(path))
    names = tuple(folders) if classes is None else _check_classes(classes)
    if unknown := sorted(set(folders) - set(names)):
        raise ValueError(
            f"classes: expected all subfolders of {str(root)!r}, got {names!r} without {unknown!r}. Add them to "
            "classes, also for the training set, or remove the folders."
        )
    found = [list_files(root / name, suffixes) for name in names]
    if classes is None and [] in found:
        raise ValueError(
            f"Found no file ({', '.join(suffixes)}) of the class {str(root / names[found.index([])])!r}. Remove the "
            "folder, or pass classes= with the names of all classes."
        )
    labels = np.repeat(np.arange(len(names)), [len(files) for files in found])
    return names, [file for files in found for file in files], labels.tolist()


def _check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    names = isinstance(classes, Sequence) and not isinstance(classes, str)
    expect(names, "classes", classes, "a sequence of names such as ('cat', 'dog'), or None", TypeError)
    expect(0 < len(set(classes)) == len(classes), "classes", classes, "at least one name, and each name once")
    return tuple(classes)


def _is_visible(path: Path) -> bool:
    """Return whether this is a folder that is not hidden, and not a link to one of its parents."""
    hidden = path.name.startswith(".") or path.parent.resolve().is_relative_to(path.resolve())
    return path.is_dir() and not hidden
