"""Checks for optional packages without importing them."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from lightning_turbo.errors import MissingExtraError

__all__ = ["EXTRAS", "how_to_install", "installed", "installed_version", "require"]

# What pip installs this package from: "." in a clone until a package index has it. A test compares the pages with it,
# so a release changes this line and the pages that the test names.
SOURCE = "."
# Import name -> (distributions that provide it, the extra of lightning-turbo that installs one of them).
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "PIL": (("pillow",), "pack"),
    "blosc2": (("blosc2",), "compress"),
    "isal": (("isal",), "pack"),
    "matplotlib": (("matplotlib",), "pictures"),
    "nibabel": (("nibabel",), "pack"),
    "nvidia.dali": (("nvidia-dali-cuda120", "nvidia-dali-cuda130"), "dali"),
    "pytorch_optimizer": (("pytorch_optimizer",), "optim"),
    "ray": (("ray",), "ray"),
    "scipy": (("scipy",), "pack"),
}


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or ``None`` if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed(module: str) -> bool:
    """Return whether ``module`` can be imported from one of its known distributions.

    Args:
        module: An import name, one of the keys of ``EXTRAS``.
    """
    distributions, _ = EXTRAS[module]
    # The spec alone would also find a folder of that name in the working directory.
    known = any(installed_version(name) is not None for name in distributions)
    return known and importlib.util.find_spec(module) is not None


def how_to_install(module: str) -> str:
    """Return the command that installs an optional package, and where to run it.

    Args:
        module: An import name, one of the keys of ``EXTRAS``.
    """
    extra = EXTRAS[module][1]
    if module == "nvidia.dali" and _cuda_of_torch() >= 13:
        extra = "dali-cuda130"
    where = " in the clone of lightning-turbo" if SOURCE == "." else ""
    return f"pip install '{SOURCE}[{extra}]'{where}"


def _cuda_of_torch() -> int:
    """Return the major CUDA version that torch was built with, or 0 for a CPU build."""
    import torch

    return int((torch.version.cuda or "0").partition(".")[0])


def require(module: str, needed_by: str) -> None:
    """Raise an error that names the extra if an optional package is not installed.

    Args:
        module: An import name, one of the keys of ``EXTRAS``.
        needed_by: What needs the package, in the user's words, for example ``"DALILoader"``.

    Raises:
        MissingExtraError: If the package is not installed.
    """
    if installed(module):
        return
    distributions, _ = EXTRAS[module]
    raise MissingExtraError(
        f"{needed_by} needs the package {' or '.join(distributions)}, which is not installed. "
        f"Install it with: {how_to_install(module)}",
        name=module,
    )
