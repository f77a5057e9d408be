"""Build the wheel and the sdist, check their contents, and run the commands of each outside the repository.

    python tests/release/package.py [--keep FOLDER]

Installs the exact versions of constraints.txt. Requires network access, and takes some minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
SCRIPT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = Trainer(max_epochs=1, limit_val_batches=0, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(256, 32), batch_size=4))
"""
WHERE = "import lightning_turbo; print(lightning_turbo.__file__)"


def run(*command, cwd, env=None):
    print("$", *(str(part) for part in command), flush=True)
    return subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True, text=True)


def tracked(*folders):
    """Return the files in the folders that git tracks. The wheel must have those of the package."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, text=True, capture_output=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def inspect(wheel, sdist):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected, package = tracked("lightning_turbo"), {name for name in names if name.startswith("lightning_turbo/")}
    info = {name.split(".dist-info/", 1)[1] for name in names if ".dist-info/" in name}
    assert "lightning_turbo/py.typed" in package
    assert package == expected, f"differs from git: {sorted(package ^ expected)}"
    assert info == INFO, f"differs: {sorted(info ^ INFO)}"
    assert len(package) + len(info) == len(names), f"more than the package: {sorted(names - package)}"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    missing = (expected | {"LICENSE", "README.md", "pyproject.toml"}) - inside
    assert not missing, f"the sdist lacks {sorted(missing)}"
    assert not [name for name in inside if name.startswith("tests/")]
    print(f"{wheel.name}: {len(package)} files of the package, py.typed, no tests; {sdist.name} has the same files")


def install_and_run(archive, folder):
    """Install an archive without extras in a new environment, and run its commands there."""
    folder.mkdir()
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    run(*pip, "torch", cwd=folder)
    run(*pip, archive, cwd=folder)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    where = subprocess.run(
        [python, "-c", WHERE], cwd=folder, env=env, check=True, text=True, capture_output=True
    ).stdout.strip()
    assert Path(where).is_relative_to(folder / "venv"), f"expected the installed package, got {where}"
    command = python.with_name("lightning-turbo")
    run(command, "doctor", cwd=folder, env=env)
    (folder / "train.py").write_text(SCRIPT)
    run(command, "doctor", "train.py", cwd=folder, env=env)
    run(command, "tune", "--minutes", "0.2", "--only", "lean", "train.py", cwd=folder, env=env)
    assert not (folder / "runs" / "tune" / "tune.png").exists(), "expected no chart without matplotlib"
    print(f"{archive.name}: installed, doctor and tune ran", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder to copy the wheel and the sdist to")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="turbo-release-") as name:
        work = Path(name)
        # Built from a copy of the tracked files, without leftovers of an earlier build.
        source = work / "source"
        source.mkdir()
        for path in tracked():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / path)
        run(sys.executable, "-m", "build", "--outdir", work / "dist", source, cwd=work)
        (wheel,) = (work / "dist").glob("*.whl")
        (sdist,) = (work / "dist").glob("*.tar.gz")
        inspect(wheel, sdist)
        for archive in (wheel, sdist):
            install_and_run(archive, work / archive.suffix.strip("."))
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for archive in (wheel, sdist):
                shutil.copy(archive, keep)


if __name__ == "__main__":
    main()
