"""Files below a folder, and the classes that its subfolders are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["check_classes", "find_classes", "list_files"]


def list_files(folder: str | os.PathLike[str], suffixes: Sequence[str]) -> list[Path]:
    """Return the files below a folder that end in one of ``suffixes``, sorted.

    Hidden files and folders (``.DS_Store``, ``.ipynb_checkpoints``) are passed over. Links to folders are followed,
    unless they lead to a folder that holds the link.
    """
    files: list[Path] = []
    for where, folders, names in os.walk(folder, followlinks=True):
        here = Path(where)
        files += [here / name for name in names if _is_visible(name) and name.lower().endswith(tuple(suffixes))]
        folders[:] = [name for name in folders if _is_visible(name) and not _leads_up(here / name)]
    return sorted(files)


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
    folders = [path.name for path in sorted(root.iterdir()) if _is_class(path)]
    names = tuple(folders if classes is None else classes)
    if unknown := set(folders) - set(names):
        raise ValueError(
            f"{str(root)!r} holds the folders {sorted(unknown)!r}, which are not in classes={names!r}. "
            "Add them to classes, in the training set too, or remove the folders."
        )
    found = [list_files(root / name, suffixes) for name in names]
    if classes is None and [] in found:
        raise ValueError(
            f"The class {str(root / names[found.index([])])!r} holds no file that ends in {', '.join(suffixes)}. Fill "
            "the folder, remove it, or pass classes= with the names of all classes."
        )
    labels = [label for label, files in enumerate(found) for _ in files]
    return names, [file for files in found for file in files], labels


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


def _is_class(path: Path) -> bool:
    return path.is_dir() and _is_visible(path.name) and not _leads_up(path)


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _leads_up(folder: Path) -> bool:
    """Tell whether a folder is a link to a folder above it, which would never end."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())
