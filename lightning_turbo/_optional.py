"""Probes for packages that may be absent, without importing them."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from lightning_turbo.errors import MissingExtraError

__all__ = ["EXTRAS", "installed", "installed_version", "require"]

# Import name -> (distributions that bring it, the extra of lightning-turbo that installs one of them).
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "PIL": (("pillow",), "dev"),
    "jsonargparse": (("jsonargparse",), "dev"),
    "matplotlib": (("matplotlib",), "demo"),
    "nibabel": (("nibabel",), "nifti"),
    "nilearn": (("nilearn",), "demo"),
    "nvidia.dali": (("nvidia-dali-cuda120", "nvidia-dali-cuda130"), "dali"),
    "pytorch_optimizer": (("pytorch_optimizer",), "optim"),
    "rich": (("rich",), "demo"),
    "sklearn": (("scikit-learn",), "demo"),
    "tensorboard": (("tensorboard",), "demo"),
}


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or ``None`` if it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed(module: str) -> bool:
    """Tell whether ``module`` can be imported from one of its known distributions.

    Both the module's spec and the distribution's metadata must be found, so that a stray folder of that
    name does not count.

    Args:
        module: An import name, one of the keys of ``EXTRAS``.
    """
    distributions, _ = EXTRAS[module]
    try:
        if importlib.util.find_spec(module) is None:
            return False
    except ModuleNotFoundError:
        return False
    return any(installed_version(name) is not None for name in distributions)


def require(module: str, needed_by: str) -> None:
    """Refuse, in words, to go on without an optional package.

    Args:
        module: An import name, one of the keys of ``EXTRAS``.
        needed_by: What asked for it, as the user wrote it, for example ``"DALILoader"``.

    Raises:
        MissingExtraError: If the package is not installed; the message names the extra.
    """
    if installed(module):
        return
    distributions, extra = EXTRAS[module]
    raise MissingExtraError(
        f"{needed_by} needs the package {' or '.join(distributions)}, which is not installed. "
        f"Install it with: pip install 'lightning-turbo[{extra}]'",
        name=module,
    )
