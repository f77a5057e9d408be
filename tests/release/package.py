"""Build the wheel and the sdist, check their contents, and run the commands of each outside the repository.

    python tests/release/package.py [--inspect] [--keep FOLDER] [--tag TAG] [--repository ADDRESS]

Installs the exact versions of constraints.txt. Requires network access, and takes some minutes.
"""

import argparse
import os
import re
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
PAGES = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}


def run(*command, cwd, env=None):
    print("$", *(str(part) for part in command), flush=True)
    return subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True, text=True)


def tracked(*folders):
    """Return the files in the folders that git tracks. The wheel must have those of the package."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, text=True, capture_output=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def readme_script():
    """Return ``SCRIPT`` with the Trainer that the README shows as a difference."""
    shown = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    trainer = "\n".join(line[1:] for line in shown.splitlines() if not line.startswith("-"))
    script, count = re.subn(r"^trainer = .*$", trainer, SCRIPT, flags=re.MULTILINE)
    assert count == 1
    return script.replace("max_epochs=10", "max_epochs=1")


def link(source, repository):
    """Write the address of the repository into the metadata of what is built."""
    urls = "".join(f'{name} = "{repository.rstrip("/")}{page}"\n' for name, page in PAGES.items())
    project = source / "pyproject.toml"
    project.write_text(
        project.read_text().replace("[project.scripts]", f"[project.urls]\n{urls}\n[project.scripts]", 1)
    )


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
    (folder / "readme.py").write_text(readme_script())
    run(python, "readme.py", cwd=folder, env=env)
    run(command, "tune", "--minutes", "0.2", "--only", "lean", "train.py", cwd=folder, env=env)
    assert (folder / "runs" / "tune" / "turbo.yaml").exists()
    print(f"{archive.name}: installed; the README's lines, doctor and tune ran", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder to copy the wheel and the sdist to")
    parser.add_argument("--inspect", action="store_true", help="only build the two and look into them")
    parser.add_argument("--tag", help="tag of the commit; expected to name the version")
    parser.add_argument("--repository", default="", help="address of the repository, for the metadata")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turbo-release-") as name:
        work = Path(name)
        # Built from a copy of the tracked files, without leftovers of an earlier build.
        source = work / "source"
        source.mkdir()
        for path in tracked():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / path)
        if args.repository:
            link(source, args.repository)
        run(sys.executable, "-m", "build", "--outdir", work / "dist", source, cwd=work)
        (wheel,) = (work / "dist").glob("*.whl")
        (sdist,) = (work / "dist").glob("*.tar.gz")
        inspect(wheel, sdist)
        version = wheel.name.split("-")[1]
        if args.tag not in (None, f"v{version}"):
            parser.error(f"--tag: expected v{version}, the version in lightning_turbo/__init__.py, got {args.tag}")
        for archive in () if args.inspect else (wheel, sdist):
            install_and_run(archive, work / archive.suffix.strip("."))
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            for archive in (wheel, sdist):
                shutil.copy(archive, args.keep)
    print(f"To release it: git tag v{version}, and push the tag.")


if __name__ == "__main__":
    main()
