"""``python -m benchmarks public``: tune public scripts made small, and judge what is promised by whole epochs.

Of each script one setting is measured that a search of all had found to help there: ``--all`` searches again.

No script is here: each comes from a clone of its repository in the folder that ``--repositories`` names, at the commit
of the table. What is made small is outside of it: arguments, limits of the Trainer by variables of the environment
that Lightning reads, and files of random data where its data set looks for those that it would download.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import words
from lightning_turbo._optional import installed_version
from lightning_turbo.measure import describe_machine, markdown_table, print_lines, three_digits

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "lightning", "torchvision", "hydra-core", "pyro-ppl", "gym")
COLUMNS = (
    "Script",
    "Recommended",
    "Promised, times as fast (95 % interval)",
    "Epoch without and with it, s",
    "Measured, times as fast (95 % interval)",
    "Pairs",
    "Width",
    "Contains the promise",
)
WIDEST = 0.15  # of the factor, an interval that can tell something
SOURCES = ("Script", "Trains", "From", "Commit", "Licence", "Made small by")
DRAW = np.random.default_rng(0)


def write_words(folder: Path) -> None:
    """Write a text for ``WikiText2`` of Lightning's demos."""
    words.write(folder / "wikitext-2.txt")


def write_mnist(folder: Path) -> None:
    """Write images and labels as torchvision's ``MNIST`` reads them, in the number of the real ones."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        head = np.array([2051, count, 28, 28], ">i4").tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + DRAW.bytes(count * 28 * 28))
        labels = DRAW.integers(10, size=count, dtype=np.uint8).tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(np.array([2049, count], ">i4").tobytes() + labels)


def write_cifar(folder: Path) -> None:
    """Write images and labels as torchvision's ``CIFAR10`` reads them, in the number of the real ones."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        images = DRAW.integers(256, size=(10_000, 3072), dtype=np.uint8)
        labels = DRAW.integers(10, size=10_000).tolist()
        (batches / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {each}" for each in range(10)]}))


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script of the public, and what makes it small."""

    repository: str  # on GitHub
    commit: str
    licence: str
    path: str
    trains: str
    setting: str  # of tune
    folder: str = ""  # of the repository, what the script needs of it; the script's own if empty
    arguments: tuple[str, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)  # arguments of the Trainer that the script does not give
    data: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)  # folder -> what writes its files
    downloads: bool = False  # runs by ``benchmarks.offline``

    @property
    def environment(self) -> dict[str, str]:
        """What is set for it."""
        limits = {f"PL_TRAINER_{name.upper()}": str(value) for name, value in self.trainer.items()}
        return {"MPLBACKEND": "Agg", "PATH_DATASETS": "data", **limits}

    @property
    def command(self) -> list[str]:
        """It and its arguments, behind ``lightning-turbo tune``."""
        return [*(["-m", "benchmarks.offline"] if self.downloads else []), self.path, *self.arguments]


LIGHTNING: dict[str, Any] = {
    "repository": "Lightning-AI/pytorch-lightning",
    "commit": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "licence": "Apache-2.0",
}
TUTORIALS: dict[str, Any] = {
    "repository": "Lightning-AI/tutorials",
    "commit": "15817658a2d63afa338b9e1cd8454fb98d746fac",
    "licence": "CC BY-SA",
    "downloads": True,
}
UVA = "course_UvA-DL"
LIMITS = ("--trainer.limit_train_batches=600", "--trainer.limit_val_batches=50")
SCRIPTS = {
    "transformer": Script(
        **LIGHTNING,
        path="examples/pytorch/basics/transformer.py",
        trains="a language model",
        setting="bf16-mixed",
        trainer={"limit_train_batches": 60, "limit_val_batches": 10},
        data={"data": write_words},
    ),
    "autoencoder": Script(
        **LIGHTNING,
        path="examples/pytorch/basics/autoencoder.py",
        trains="an autoencoder of MNIST, with LightningCLI",
        setting="lean",
        arguments=LIMITS,
        data={"data": write_mnist, "examples/Datasets": write_mnist},
    ),
    "classifier": Script(
        **LIGHTNING,
        path="examples/pytorch/basics/backbone_image_classifier.py",
        trains="a classifier of MNIST, with LightningCLI",
        setting="lean",
        arguments=LIMITS,
        data={"data": write_mnist, "examples/Datasets": write_mnist},
    ),
    "gan": Script(
        **TUTORIALS,
        path="lightning_examples/basic-gan/gan.py",
        trains="a GAN of MNIST, in manual optimization",
        setting="fused",
        trainer={"limit_train_batches": 150},
        data={"data": write_mnist},
    ),
    "energy": Script(
        **TUTORIALS,
        path=f"{UVA}/07-deep-energy-based-generative-models/notebook.py",
        trains="an energy-based model of MNIST, which draws samples in each step",
        setting="bf16-mixed",
        trainer={"limit_train_batches": 8, "limit_val_batches": 2},
        data={"data": write_mnist},
    ),
    "deep-autoencoder": Script(
        **TUTORIALS,
        path=f"{UVA}/08-deep-autoencoders/notebook.py",
        trains="a convolutional autoencoder of CIFAR-10",
        setting="bf16-mixed",
        trainer={"limit_train_batches": 20, "limit_val_batches": 5},
        data={"data": write_cifar},
    ),
    "attention": Script(
        **TUTORIALS,
        path=f"{UVA}/05-transformers-and-MH-attention/MHAttention.py",
        trains="a small transformer that reverses sequences",
        setting="lean",
        data={"data": write_cifar},
    ),
    "hydra": Script(
        repository="ashleve/lightning-hydra-template",
        commit="bddbc24b82ab6ccfa6243e815a49dc5bfe8d4144",
        licence="MIT",
        path="src/train.py",
        folder=".",
        trains="a classifier of MNIST, put together by Hydra",
        setting="workers-2-omp-1",
        trainer={"limit_train_batches": 400, "limit_val_batches": 40},
        data={"data": write_mnist},
    ),
    "svi": Script(
        repository="pyro-ppl/pyro",
        commit="ff6ae1c9572591791aae8842bcd702fcf0b46fd6",
        licence="Apache-2.0",
        path="examples/svi_lightning.py",
        trains="a probabilistic model, with Pyro",
        setting="lean",
        arguments=("--size", "200000"),
    ),
    "ppo": Script(
        **LIGHTNING,
        path="examples/pytorch/domain_templates/reinforce_learn_ppo.py",
        trains="a policy, on steps that it takes itself",
        setting="lean",
        arguments=("--env", "CartPole-v1", "--steps_per_epoch", "10240"),
    ),
}


def tune(script: Script, repositories: Path, folder: Path, out: Path, options: Sequence[str]) -> dict[str, Any]:
    """Tune a script in a folder that gets what it needs of its repository.

    Args:
        script: From the table.
        repositories: The folder of clones.
        folder: An empty one.
        out: Where tune writes.
        options: Of the command.

    Returns:
        What tune wrote to ``out``.
    """
    clone = repositories / Path(script.repository).name
    archive, part = folder / "part.zip", script.folder or str(Path(script.path).parent)
    command = ["archive", "--format", "zip", "--output", str(archive), script.commit, part]
    subprocess.run(["git", "-C", str(clone), *command], check=True)
    shutil.unpack_archive(archive, folder)
    for name, write in script.data.items():
        write(folder / name)
    environment = {**os.environ, **script.environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "lightning_turbo", "tune", "--confirm", *options]
    ended = subprocess.run([*command, "--out", str(out), *script.command], cwd=folder, env=environment, check=False)
    if ended.returncode:
        (out / "tune.json").unlink(missing_ok=True)  # of a search that was ended
        return {"error": f"tune ended with exit status {ended.returncode}"}
    return json.loads((out / "tune.json").read_text())


def confirmed(results: Mapping[str, Any]) -> str:
    """Return whether the measured interval of whole epochs contains the promise of one; nothing of none trained."""
    epochs = results.get("epochs", {})
    if "promised" not in epochs:
        return epochs.get("error", "")
    if not epochs.get("promised_epochs", True):  # older results are all of epochs
        return "of steps alone"
    if epochs["interval"] is None:
        return "one pair"
    low, high = epochs["interval"]
    return "yes" if low <= epochs["promised"] <= high else "no"


def width(results: Mapping[str, Any]) -> float | None:
    """Return how wide the measured interval is, as a share of the factor."""
    epochs = results.get("epochs", {})
    low, high = epochs.get("interval") or (None, None)
    return None if low is None else (high - low) / epochs["factor"]


def row(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the cells of a script."""
    if "error" in results:
        return [f"`{name}`", results["error"], *[""] * 6]
    chosen, epochs, wide = results["chosen"], results.get("epochs", {}), width(results)
    seconds = [three_digits(epochs[which]["seconds"]) for which in ("default", "chosen") if which in epochs]
    return [
        f"`{name}`",
        " + ".join(chosen["settings"]) or results["verdict"],
        _factor(epochs["promised"], epochs["expected"]) if "promised" in epochs else "",
        ", ".join(seconds),
        _factor(epochs["factor"], epochs["interval"]) if "factor" in epochs else "",
        str(len(epochs["factors"])) if "factors" in epochs else "",
        "" if wide is None else f"{100 * wide:.0f} %",
        confirmed(results),
    ]


def _factor(factor: float, interval: Sequence[float] | None) -> str:
    between = "" if interval is None else f" ({interval[0]:.2f}-{interval[1]:.2f})"
    return f"{factor:.2f}{between}"


def source(name: str, script: Script) -> list[str]:
    """Return the cells that say where a script is from, and what makes it small."""
    limits = [f"{each}={value}" for each, value in script.trainer.items()]
    where = f"[{script.repository}](https://github.com/{script.repository}/blob/{script.commit}/{script.path})"
    small = ", ".join([*limits, *filter(None, [shlex.join(script.arguments)])])
    return [f"`{name}`", script.trains, where, script.commit[:7], script.licence, small]


def page(results: Mapping[str, Mapping[str, Any]], minutes: float) -> list[str]:
    """Return the lines of the page."""
    answers = [confirmed(each) for each in results.values()]
    promises = len(answers) - answers.count("")
    widths = [each for each in map(width, results.values()) if each is not None]
    narrow = sum(each <= WIDEST for each in widths)
    loads = [each["other_cores"] for each in results.values() if each.get("other_cores") is not None]
    only = "" if len(results) == len(SCRIPTS) else f" --only {' '.join(results)}"
    command = f"python -m benchmarks public --minutes {minutes:g}{only}"
    facts = describe_machine("cpu")
    versions = [f"{name} {found}" for name in PACKAGES if (found := installed_version(name))]
    return [
        "# Public scripts: what tune promises, and what whole epochs show\n",
        f"The measured interval of an epoch's factor contains the promise in {answers.count('yes')} of {promises}",
        f"scripts with a recommendation, and is no wider than {100 * WIDEST:.0f} % in {narrow} of {len(widths)}.\n",
        f"Command, on {datetime.now(timezone.utc):%Y-%m-%d}: `{command}`.",
        f"{facts['processor']}, {facts['cores']} cores, {', '.join(versions)}.",
        *([f"Other programs took {min(loads):.1f} to {max(loads):.1f} cores meanwhile.\n"] if loads else [""]),
        *markdown_table(COLUMNS, [row(name, each) for name, each in results.items()]),
        "\nPromised: by rounds of steps, a border and a part of a validation in pairs of processes. Measured: whole",
        "epochs without and with the recommendation, in two processes that go on alternately, second by second.",
        "No script was edited. Data are random, in files as the real ones.\n",
        *markdown_table(SOURCES, [source(name, SCRIPTS[name]) for name in results]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, tune, and return 1 where epochs were not as promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks public", description="Tune public scripts made small.")
    parser.add_argument("--repositories", type=Path, required=True, help="folder of clones, named as on GitHub")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each, without the epochs (default: 2)")
    parser.add_argument("--page", type=Path, help="write the tables to this file, too")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="scripts")
    parser.add_argument("--all", action="store_true", help="search all settings, in place of one a script")
    parser.add_argument("--out", type=Path, default=Path("runs/public"), help="what tune writes (default: runs/public)")
    parser.add_argument("--resume", action="store_true", help="keep what is in --out of an earlier run")
    asked = parser.parse_args(arguments)
    repositories = {SCRIPTS[name].repository for name in asked.only}
    if missing := [each for each in sorted(repositories) if not (asked.repositories / Path(each).name).is_dir()]:
        clones = [f"git clone https://github.com/{each} {asked.repositories / Path(each).name}" for each in missing]
        parser.error("\n".join(["expected clones of all repositories:", *clones]))
    found: dict[str, dict[str, Any]] = {}
    for name in asked.only:
        clones, out = asked.repositories.absolute(), asked.out.absolute() / name
        with tempfile.TemporaryDirectory() as folder:
            if asked.resume and (out / "tune.json").exists():
                found[name] = json.loads((out / "tune.json").read_text())
            else:
                options = ["--minutes", str(asked.minutes)]
                options += [] if asked.all else ["--only", SCRIPTS[name].setting]
                options += ["--resume"] if asked.resume and (out / "measured.json").exists() else []
                found[name] = tune(SCRIPTS[name], clones, Path(folder), out, options)
        print_lines(" | ".join(row(name, found[name])))  # what is known is not lost
    print_lines("", *page(found, asked.minutes))
    if asked.page is not None:
        asked.page.write_text("\n".join(page(found, asked.minutes)) + "\n")
    return 1 if any(confirmed(results) == "no" for results in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
