"""``python -m benchmarks public``: tune small versions of public scripts, and check what was promised.

A promise of ``tune``, the lower end of its interval, holds if a second run with the same settings finds at least as
much. The first run tries ``SETTINGS``, or all with ``--all``; the second what the first recommended.

The scripts come from clones of their repositories in the folder ``--repositories``, at the commits in ``SCRIPTS``. No
script is edited. It becomes small by arguments, by limits of the Trainer in environment variables that Lightning reads,
and by files of random data in the place of those that its dataset would download.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shlex
import statistics
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
from benchmarks.clones import environment, extract
from lightning_turbo._optional import installed_version
from lightning_turbo.measure import describe_machine, markdown_table, print_lines, three_digits

PACKAGES = ("torch", "lightning", "torchvision", "hydra-core", "pyro-ppl", "gym")
COLUMNS = (
    "Script",
    "Recommended",
    "Promised: at least, about (95 % interval), times as fast",
    "Of",
    "Without and with it, s",
    "A second run, times as fast (95 % interval)",
    "Width",
    "Kept",
)
SETTINGS = "lean,fused,workers-*-omp-*,bf16-mixed"
WIDEST = 0.15  # width of a useful interval, as a fraction of the factor
SOURCES = ("Script", "Trains", "From", "Commit", "License", "Made small by")
GENERATOR = np.random.default_rng(0)


def write_words(folder: Path) -> None:
    """Write the text file that ``WikiText2`` of Lightning's demos reads."""
    words.write(folder / "wikitext-2.txt")


def write_mnist(folder: Path) -> None:
    """Write random files in the format and size of torchvision's ``MNIST``."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        head = np.array([2051, count, 28, 28], ">i4").tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + GENERATOR.bytes(count * 28 * 28))
        labels = GENERATOR.integers(10, size=count, dtype=np.uint8).tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(np.array([2049, count], ">i4").tobytes() + labels)


def write_cifar(folder: Path) -> None:
    """Write random files in the format and size of torchvision's ``CIFAR10``."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        images = GENERATOR.integers(256, size=(10_000, 3072), dtype=np.uint8)
        labels = GENERATOR.integers(10, size=10_000).tolist()
        (batches / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {each}" for each in range(10)]}))


@dataclass(frozen=True, kw_only=True)
class Script:
    """A public script, and what makes it small.

    Attributes:
        repository: Owner and name on GitHub.
        commit: Commit of the repository.
        license: License of the script.
        path: Path of the script in the repository.
        trains: What the script trains, in words.
        folder: Folder of the repository that the script needs; if empty, the folder of the script.
        arguments: Arguments of the script.
        trainer: Arguments of the Trainer that the script does not set itself.
        data: Folder -> function that writes random data into it.
        downloads: Whether the script downloads files, so that it runs with ``benchmarks.offline``.
    """

    repository: str
    commit: str
    license: str
    path: str
    trains: str
    folder: str = ""
    arguments: tuple[str, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    downloads: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the script."""
        limits = {f"PL_TRAINER_{name.upper()}": str(value) for name, value in self.trainer.items()}
        return {"MPLBACKEND": "Agg", "PATH_DATASETS": "data", **limits}

    @property
    def command(self) -> list[str]:
        """The script with its arguments, as ``lightning-turbo tune`` takes them."""
        return [*(["-m", "benchmarks.offline"] if self.downloads else []), self.path, *self.arguments]


LIGHTNING: dict[str, Any] = {
    "repository": "Lightning-AI/pytorch-lightning",
    "commit": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "license": "Apache-2.0",
}
TUTORIALS: dict[str, Any] = {
    "repository": "Lightning-AI/tutorials",
    "commit": "15817658a2d63afa338b9e1cd8454fb98d746fac",
    "license": "CC BY-SA",
    "downloads": True,
}
UVA = "course_UvA-DL"
LIMITS = ("--trainer.limit_train_batches=300", "--trainer.limit_val_batches=25")
SCRIPTS = {
    "transformer": Script(
        **LIGHTNING,
        path="examples/pytorch/basics/transformer.py",
        trains="a language model",
        trainer={"limit_train_batches": 20, "limit_val_batches": 3},
        data={"data": write_words},
    ),
    "autoencoder": Script(
        **LIGHTNING,
        path="examples/pytorch/basics/autoencoder.py",
        trains="an autoencoder of MNIST, with LightningCLI",
        arguments=LIMITS,
        data={"data": write_mnist, "examples/Datasets": write_mnist},
    ),
    "classifier": Script(
        **LIGHTNING,
        path="examples/pytorch/basics/backbone_image_classifier.py",
        trains="a classifier of MNIST, with LightningCLI",
        arguments=LIMITS,
        data={"data": write_mnist, "examples/Datasets": write_mnist},
    ),
    "gan": Script(
        **TUTORIALS,
        path="lightning_examples/basic-gan/gan.py",
        trains="a GAN of MNIST, in manual optimization",
        trainer={"limit_train_batches": 100},
        data={"data": write_mnist},
    ),
    "energy": Script(
        **TUTORIALS,
        path=f"{UVA}/07-deep-energy-based-generative-models/notebook.py",
        trains="an energy-based model of MNIST, which draws samples in each step",
        trainer={"limit_train_batches": 8, "limit_val_batches": 2},
        data={"data": write_mnist},
    ),
    "deep-autoencoder": Script(
        **TUTORIALS,
        path=f"{UVA}/08-deep-autoencoders/notebook.py",
        trains="a convolutional autoencoder of CIFAR-10",
        trainer={"limit_train_batches": 12, "limit_val_batches": 3},
        data={"data": write_cifar},
    ),
    "attention": Script(
        **TUTORIALS,
        path=f"{UVA}/05-transformers-and-MH-attention/MHAttention.py",
        trains="a small transformer that reverses sequences",
        data={"data": write_cifar},
    ),
    "hydra": Script(
        repository="ashleve/lightning-hydra-template",
        commit="bddbc24b82ab6ccfa6243e815a49dc5bfe8d4144",
        license="MIT",
        path="src/train.py",
        folder=".",
        trains="a classifier of MNIST, put together by Hydra",
        trainer={"limit_train_batches": 200, "limit_val_batches": 20},
        data={"data": write_mnist},
    ),
    "svi": Script(
        repository="pyro-ppl/pyro",
        commit="ff6ae1c9572591791aae8842bcd702fcf0b46fd6",
        license="Apache-2.0",
        path="examples/svi_lightning.py",
        trains="a probabilistic model, with Pyro",
        arguments=("--size", "100000"),
    ),
    "ppo": Script(
        **LIGHTNING,
        path="examples/pytorch/domain_templates/reinforce_learn_ppo.py",
        trains="a policy, on steps that it takes itself",
        arguments=("--env", "CartPole-v1", "--steps_per_epoch", "5120"),
    ),
}


def tune(script: Script, repositories: Path, folder: Path, out: Path, options: Sequence[str]) -> dict[str, Any]:
    """Tune a script in a folder with a copy of the part of its repository that it needs.

    Args:
        script: The script.
        repositories: Folder with the clones.
        folder: Empty folder for the copy.
        out: Folder for the results of ``tune``.
        options: Further options of ``lightning-turbo tune``.

    Returns:
        The content of ``tune.json``, or an ``"error"``.
    """
    part = script.folder or str(Path(script.path).parent)
    extract(repositories, script.repository, script.commit, [part], folder)
    for name, write in script.data.items():
        write(folder / name)
    command = [sys.executable, "-m", "lightning_turbo", "tune", *options]
    ended = subprocess.run(
        [*command, "--out", str(out), *script.command], cwd=folder, env=environment(**script.environment), check=False
    )
    if ended.returncode:
        (out / "tune.json").unlink(missing_ok=True)  # the results are not complete
        return {"error": f"tune ended with exit status {ended.returncode}"}
    return json.loads((out / "tune.json").read_text())


def kept(results: Mapping[str, Any]) -> str:
    """Return whether a second run found at least what was promised; empty if nothing was promised."""
    second = results.get("second")
    if second is None:
        return ""
    if second["promise"]["factor"] is None:
        return second["verdict"]
    return "yes" if second["promise"]["factor"] >= results["promise"]["interval"][0] else "no"


def width(results: Mapping[str, Any]) -> float | None:
    """Return the width of the promised interval, as a fraction of the factor."""
    promise = results.get("promise", {})
    if not promise.get("interval"):
        return None
    return (promise["interval"][1] - promise["interval"][0]) / promise["factor"]


def row(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the cells of a script in the first table."""
    if "error" in results:
        return [f"`{name}`", results["error"], *[""] * 6]
    promise, second, wide = results["promise"], results.get("second"), width(results)
    if not results["chosen"]["settings"]:
        return [f"`{name}`", results["verdict"], *[""] * 4, "" if wide is None else f"{100 * wide:.0f} %", ""]
    of = f"{promise['steps']} steps" if promise["of"] == "steps" else f"whole epochs ({promise['steps']} steps)"
    sides = zip(*promise["pairs_seconds"], strict=True)
    again = None if second is None or second["promise"]["factor"] is None else second["promise"]
    return [
        f"`{name}`",
        " + ".join(results["chosen"]["settings"]),
        f"{promise['interval'][0]:.2f}, {_factor(promise)}",
        of,
        ", ".join(three_digits(statistics.median(side)) for side in sides),
        "" if again is None else _factor(again),
        f"{100 * (wide or 0.0):.0f} %",
        kept(results),
    ]


def _factor(promise: Mapping[str, Any]) -> str:
    between = "" if promise["interval"] is None else f" ({promise['interval'][0]:.2f}-{promise['interval'][1]:.2f})"
    return f"{promise['factor']:.2f}{between}"


def source(name: str, script: Script) -> list[str]:
    """Return the cells of a script in the second table: its source, and what makes it small."""
    limits = [f"{each}={value}" for each, value in script.trainer.items()]
    where = f"[{script.repository}](https://github.com/{script.repository}/blob/{script.commit}/{script.path})"
    small = ", ".join([*limits, *filter(None, [shlex.join(script.arguments)])])
    return [f"`{name}`", script.trains, where, script.commit[:7], script.license, small]


def page(results: Mapping[str, Mapping[str, Any]], minutes: float) -> list[str]:
    """Return the lines of the Markdown page."""
    answers = [kept(each) for each in results.values()]
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
        f"A second run found at least what was promised in {answers.count('yes')} of {promises} scripts with a",
        f"recommendation; the promised interval is no wider than {100 * WIDEST:.0f} % in {narrow} of {len(widths)}.\n",
        f"Command, on {datetime.now(timezone.utc):%Y-%m-%d}: `{command}`.",
        f"{facts['processor']}, {facts['cores']} cores, {', '.join(versions)}.",
        *([f"Other programs used {min(loads):.1f} to {max(loads):.1f} cores meanwhile.\n"] if loads else [""]),
        *markdown_table(COLUMNS, [row(name, each) for name, each in results.items()]),
        "\nTimes are of whole epochs with their validation, or of the longest equal stretch that fitted, in pairs of",
        "processes that take turns. No script was edited. The data are random, in files of the real format.\n",
        *markdown_table(SOURCES, [source(name, SCRIPTS[name]) for name in results]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the scripts twice, and return 1 if a second run contradicts a promise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks public", description="Tune public scripts made small.")
    parser.add_argument("--repositories", type=Path, required=True, help="folder with the clones, named as on GitHub")
    parser.add_argument("--minutes", type=float, default=2.0, help="limit of each run (default: 2)")
    parser.add_argument("--page", type=Path, help="also write the tables to this file")
    parser.add_argument(
        "--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="scripts (default: all)"
    )
    parser.add_argument("--all", action="store_true", help="try all settings instead of some")
    parser.add_argument("--out", type=Path, default=Path("runs/public"), help="results of tune (default: runs/public)")
    options = parser.parse_args(arguments)
    repositories = {SCRIPTS[name].repository for name in options.only}
    if missing := [each for each in sorted(repositories) if not (options.repositories / Path(each).name).is_dir()]:
        clones = [f"git clone https://github.com/{each} {options.repositories / Path(each).name}" for each in missing]
        parser.error("\n".join(["--repositories: expected clones of all repositories. Run:", *clones]))
    found: dict[str, dict[str, Any]] = {}
    for name in options.only:
        clones, out = options.repositories.absolute(), options.out.absolute() / name
        with tempfile.TemporaryDirectory() as folder:
            further = ["--minutes", str(options.minutes)]
            only = [] if options.all else ["--only", SETTINGS]
            found[name] = tune(SCRIPTS[name], clones, Path(folder), out, [*further, *only])
        if chosen := found[name].get("chosen", {}).get("settings"):
            again = ["--only", ",".join(chosen)]
            with tempfile.TemporaryDirectory() as folder:
                second = tune(SCRIPTS[name], clones, Path(folder), out / "second", [*further, *again])
            found[name]["second"] = None if "error" in second else second
        print_lines(" | ".join(row(name, found[name])))  # now, so that Ctrl-C does not lose it
    print_lines("", *page(found, options.minutes))
    if options.page is not None:
        options.page.write_text("\n".join(page(found, options.minutes)) + "\n")
    return 1 if any(kept(results) == "no" for results in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
