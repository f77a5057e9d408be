"""Parts of the clones of public repositories, and programs that run in them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["environment", "extract"]

ROOT = Path(__file__).parents[1]


def extract(repositories: Path, repository: str, commit: str, parts: Sequence[str], folder: Path) -> None:
    """Write parts of a repository, as they are at a commit, to a folder.

    Args:
        repositories: Folder with the clones.
        repository: The owner and the name, which is that of the clone.
        commit: The commit.
        parts: Files and folders in the repository.
        folder: The folder to write to.

    Raises:
        subprocess.CalledProcessError: If git fails.
    """
    archive = folder / "part.zip"
    command = ["archive", "--format", "zip", "--output", str(archive), commit, *parts]
    subprocess.run(["git", "-C", str(repositories / Path(repository).name), *command], check=True)
    shutil.unpack_archive(archive, folder)
    archive.unlink()


def environment(**more: str) -> Mapping[str, str]:
    """Return the environment of a program that imports this repository from another folder."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **more, "PYTHONPATH": paths}
