"""Runs the tests with the oldest and the newest supported torch and Lightning, each pair in an environment of its own.

    python tests/release/pairs.py oldest --folder DIR [--interpreter python3.10] [-- PYTEST ARGUMENTS]
    python tests/release/pairs.py newest --folder DIR [-- PYTEST ARGUMENTS]

``oldest`` takes the lower bounds of pyproject.toml, ``newest`` whatever pip finds within its ranges. Most builds of
torch bring CUDA along: have 10 GB free. The environment stays in DIR, and a second run uses it again.
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
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).resolve().parents[2]
RANGED = ("torch", "lightning", "pytorch-lightning")
EXTRAS = ("compress", "dali", "demo", "dev", "optim", "pack")


def requirements():
    """The ranges of RANGED, and every other package that the tests need, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = project["dependencies"] + [entry for extra in EXTRAS for entry in extras[extra]]
    ranges = [next(entry for entry in found if entry.startswith(f"{name}>")) for name in RANGED]
    return ranges, [entry for entry in found if entry not in ranges]


def oldest(requirement):
    """``torch>=2.6`` -> ``torch==2.6.0``."""
    name, version = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    return f"{name}=={version}" + ".0" * (2 - version.count("."))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="What follows -- is for pytest.")
    parser.add_argument("pair", choices=("oldest", "newest"))
    parser.add_argument("--folder", type=Path, required=True, help="for the environment")
    parser.add_argument("--interpreter", default=sys.executable, help="Python of the environment")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    asked = parser.parse_args(given[:end])
    ranges, others = requirements()
    pinned = [oldest(entry) if asked.pair == "oldest" else entry for entry in ranges]
    environment = asked.folder.resolve() / asked.pair
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([asked.interpreter, "-m", "venv", environment], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if asked.pair == "newest":
        install.append("--upgrade")
    subprocess.run([*install, *pinned, *others], check=True)
    shown = "import sys, torch, lightning; print(sys.version.split()[0], torch.__version__, lightning.__version__)"
    subprocess.run([python, "-c", shown], check=True)
    arguments = given[end + 1 :] or ["tests", "tests/integration"]
    # The repository itself is the package here: pytest puts its root on the path, and PYTHONPATH tells child processes.
    command = [python, "-m", "pytest", "-q", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    sys.exit(subprocess.run(command, cwd=ROOT, env=env).returncode)


if __name__ == "__main__":
    main()
