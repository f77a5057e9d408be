"""Run the tests with the oldest and the newest supported torch and Lightning, each pair in its own environment.

    python tests/release/pairs.py oldest --folder DIR [--interpreter python3.10] [-- PYTEST ARGUMENTS]
    python tests/release/pairs.py newest --folder DIR [-- PYTEST ARGUMENTS]

``oldest`` uses the lower bounds in pyproject.toml, ``newest`` the newest versions in its ranges. Most builds of torch
include CUDA, which takes 10 GB. The environment stays in DIR and is reused by later runs.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a requirement of pytest

ROOT = Path(__file__).resolve().parents[2]
RANGED = ("torch", "lightning", "pytorch-lightning")
EXTRAS = ("compress", "dali", "demo", "dev", "optim", "pack")


def requirements():
    """Return the requirements in ``RANGED``, and all others of the tests, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = project["dependencies"] + [entry for extra in EXTRAS for entry in extras[extra]]
    ranges = [next(entry for entry in found if entry.startswith(f"{name}>")) for name in RANGED]
    return ranges, [entry for entry in found if entry not in ranges]


def oldest(requirement):
    """Return the lower bound of a requirement: ``torch==2.6.0`` for ``torch>=2.6``."""
    name, version = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    return f"{name}=={version}" + ".0" * (2 - version.count("."))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Arguments after -- are passed to pytest."
    )
    parser.add_argument("pair", choices=("oldest", "newest"))
    parser.add_argument("--folder", type=Path, required=True, help="folder for the environment")
    parser.add_argument("--interpreter", default=sys.executable, help="Python interpreter of the environment")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    ranges, others = requirements()
    pinned = [oldest(entry) if args.pair == "oldest" else entry for entry in ranges]
    environment = args.folder.resolve() / args.pair
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([args.interpreter, "-m", "venv", environment], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if args.pair == "newest":
        install.append("--upgrade")
    subprocess.run([*install, *pinned, *others], check=True)
    shown = "import sys, torch, lightning; print(sys.version.split()[0], torch.__version__, lightning.__version__)"
    subprocess.run([python, "-c", shown], check=True)
    arguments = given[end + 1 :] or ["tests", "tests/integration"]
    # The package is imported from the repository: pytest adds its root to sys.path, and PYTHONPATH that of children.
    command = [python, "-m", "pytest", "-q", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    sys.exit(subprocess.run(command, cwd=ROOT, env=env).returncode)


if __name__ == "__main__":
    main()
