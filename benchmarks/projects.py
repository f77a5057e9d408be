"""``python -m benchmarks projects``: whole fits of public projects, as they are and with this package.

Each project is installed from the package index. Its scripts and data come from a clone of its repository in the folder
``--repositories``; a fit runs in an empty folder with a copy of the part that it needs. The fits of stock Lightning and
of ``strategy="turbo"`` with ``Prefetch()`` take turns. Then each is stopped after a step in the middle and resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.clones import environment, extract
from benchmarks.suite import BenchError
from lightning_turbo._optional import installed_version
from lightning_turbo.measure import (
    OtherLoad,
    Progress,
    describe_machine,
    markdown_table,
    print_lines,
    three_digits,
    write_json,
)

__all__ = ["PROJECTS", "WAYS", "Project", "main", "measure", "page", "row"]

WAYS = {"stock": "stock Lightning", "turbo": 'strategy="turbo", Prefetch()'}
COLUMNS = (
    "Project",
    "With",
    "Fits",
    "Whole, s",
    "Training, s",
    "A step, ms",
    "Validation, s",
    "Whole by the wall, s",
    "Times as fast (lowest and highest pair)",
    "Score",
    "Same weights as stock",
    "Resumed equal",
)
SOURCES = ("Project", "Trains", "From", "License", "Data", "Cut", "Steps")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A public project, and the fit of it that is measured.

    Attributes:
        package: Its name on the package index, for ``pip install``.
        distributions: What it needs besides, for ``pip install``.
        repository: Owner and name on GitHub.
        commit: Commit of the repository, if files of it are used.
        parts: Files and folders of the repository that the fit needs.
        license: License of the project.
        trains: What it trains, in words.
        data: Its data, in words.
        cut: What differs from the script of the project, in words.
        module: Name of the module to run.
        arguments: Arguments of the module.
        score: Metric of the validation that the table shows.
        max_epochs: Replaces that of the Trainer, if it is not ``None``.
    """

    package: str
    distributions: tuple[str, ...] = ()
    repository: str
    commit: str = ""
    parts: tuple[str, ...] = ()
    license: str
    trains: str
    data: str
    cut: str
    module: str = "benchmarks.project_scripts"
    arguments: tuple[str, ...]
    score: str
    max_epochs: int | None = None


DATA = "tests/data/regression/mol/mol.csv"
CHEMPROP = f"train -i {DATA} -t regression --epochs 20 --accelerator cpu -n 0 --pytorch-seed 0 -o out"
PROJECTS = {
    "pytorch-forecasting": Project(
        package="pytorch-forecasting",
        distributions=("pytorch-forecasting[tuning]", "pyarrow", "tensorboard", "pandas<3"),
        repository="sktime/pytorch-forecasting",
        commit="062aeb47b75d589dcce621c04572181e3584a301",
        parts=("examples",),
        license="MIT",
        trains="a temporal fusion transformer: `examples/stallion.py`",
        data="its own `stallion.parquet`, 21,000 rows",
        cut="the fit that the script has in a comment, for its search of hyperparameters; 2 epochs in place of 100; a "
        "folder for its logger, without which the script ends with an error",
        arguments=("stallion",),
        score="val_loss",
        max_epochs=2,
    ),
    "scvi-tools": Project(
        package="scvi-tools",
        repository="scverse/scvi-tools",
        license="BSD-3-Clause",
        trains="a variational autoencoder of cells: `SCVI(data).train()`",
        data="synthetic, by its own `synthetic_iid`: 4,000 cells, 500 genes",
        cut="10 epochs, each with a validation; `settings.seed = 0`",
        arguments=("scvi",),
        score="validation_loss",
    ),
    "chemprop": Project(
        package="chemprop",
        repository="chemprop/chemprop",
        commit="9a0b47ad19ebf440c1557787e666d442728adaad",
        parts=(DATA,),
        license="MIT",
        trains="a message-passing network of molecules: `chemprop train`",
        data=f"`{DATA}` of its tests, 100 molecules",
        cut="20 epochs in place of 50, with `--pytorch-seed 0`",
        arguments=("chemprop", *CHEMPROP.split()),
        score="val_loss",
    ),
}


@dataclass
class Fits:
    """Runs the fits of a project, each in a process and a folder of its own, which ``close`` of the caller removes.

    Attributes:
        project: The project.
        repositories: Folder with the clones.
        show: Told what runs.
    """

    project: Project
    repositories: Path
    show: Callable[[str], None]

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield a new folder with the part of the repository that the project needs."""
        with tempfile.TemporaryDirectory(prefix="project-", ignore_cleanup_errors=True) as name:
            if self.project.parts:
                extract(self.repositories, self.project.repository, self.project.commit, self.project.parts, Path(name))
            yield Path(name)

    def run(self, way: str, folder: Path, *, stop: int | None = None, resume: Path | None = None) -> dict[str, Any]:
        """Run a fit in a folder.

        Args:
            way: One of ``WAYS``.
            folder: Its working directory.
            stop: The step after which it is to end; the checkpoint that it writes is ``folder / "fit.ckpt"``.
            resume: The checkpoint to go on from.

        Returns:
            What ``project_run`` wrote; empty with ``stop``.

        Raises:
            BenchError: If the process failed; the message has the end of its output.
        """
        project, out = self.project, folder / ("fit.json" if stop is None else "fit.ckpt")
        task = {
            "program": [project.module, *project.arguments],
            "prefetch": way == "turbo",
            "score": project.score,
            "max_epochs": project.max_epochs,
            "stop": stop,
            "resume": None if resume is None else str(resume),
            "out": str(out),
        }
        strategy = {"PL_TRAINER_STRATEGY": "turbo"} if way == "turbo" else {}
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.project_run", json.dumps(task)],
            cwd=folder, env=environment(MPLBACKEND="Agg", **strategy), check=False, capture_output=True,
            text=True, errors="replace",
        )  # fmt: skip
        if ended.returncode or not out.exists():
            end = "\n".join(ended.stderr.splitlines()[-8:])
            raise BenchError(f"{project.package} with {WAYS[way]} ended with exit status {ended.returncode}:\n{end}")
        return {} if stop is not None else json.loads(out.read_text())

    def whole(self, way: str) -> dict[str, Any]:
        """Run a whole fit in a new folder."""
        self.show(f"{self.project.package}: a whole fit, {WAYS[way]}")
        with self.folder() as folder:
            return self.run(way, folder)

    def resumed(self, way: str, whole: Mapping[str, Any]) -> bool:
        """Stop a fit in the middle, resume it, and return whether its weights equal those of a whole fit."""
        stop = whole["steps"] // 2
        stop += stop % whole["batches"] == 0  # not at the border of an epoch, if it has several batches
        self.show(f"{self.project.package}: stopped after step {stop} and resumed, {WAYS[way]}")
        with self.folder() as first, self.folder() as second:
            self.run(way, first, stop=stop)
            return self.run(way, second, resume=first / "fit.ckpt")["digest"] == whole["digest"]


def measure(
    project: Project,
    repositories: Path,
    rounds: int,
    show: Callable[[str], None],
    save: Callable[[dict[str, Any]], object],
    former: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the whole fits of a project in turns, then one of each way that is stopped and resumed.

    Args:
        project: The project.
        repositories: Folder with the clones.
        rounds: Whole fits of each way.
        show: Told what runs.
        save: Called with the results so far after each fit.
        former: Results to go on from.

    Returns:
        The fits and the answers by the names of the ways, and how many cores other programs used during each.
    """
    fits = Fits(project, repositories, show)
    found: dict[str, Any] = {"fits": {way: [] for way in WAYS}, "resumed": {}, "other_cores": [], **(former or {})}
    found |= {"version": installed_version(project.package), "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    found["commit"] = describe_machine("cpu")["commit"]
    for number in range(rounds):
        for way in (WAYS, reversed(WAYS))[number % 2]:
            if len(found["fits"][way]) <= number:
                load = OtherLoad()
                found["fits"][way].append(fits.whole(way))
                found["other_cores"].append(load.cores())
                save(found)
    for way in WAYS:
        if way not in found["resumed"]:
            found["resumed"][way] = fits.resumed(way, found["fits"][way][0])
            save(found)
    return found


def _median(fits: Sequence[Mapping[str, Any]], part: str, clock: str = "processor") -> float:
    return statistics.median(fit[part][clock] for fit in fits)


def quotients(results: Mapping[str, Any], way: str) -> list[float]:
    """Return how many times as fast the fits of a way were as stock Lightning's beside them, by processor time."""
    pairs = zip(results["fits"]["stock"], results["fits"][way], strict=True)
    return [stock["whole"]["processor"] / fit["whole"]["processor"] for stock, fit in pairs]


def row(name: str, results: Mapping[str, Any], way: str) -> list[str]:
    """Return the cells of a project and a way in the first table."""
    fits, stock = results["fits"][way], results["fits"]["stock"][0]
    whole, validation = _median(fits, "whole"), _median(fits, "validation")
    training = statistics.median(fit["whole"]["processor"] - fit["validation"]["processor"] for fit in fits)
    factors, score = quotients(results, way), fits[0]["score"]
    same = all(fit["digest"] == stock["digest"] for fit in fits)
    return [
        name,
        WAYS[way],
        str(len(fits)),
        three_digits(whole),
        three_digits(training),
        three_digits(1e3 * training / stock["steps"]),
        three_digits(validation),
        three_digits(_median(fits, "whole", "wall")),
        "" if way == "stock" else f"{statistics.median(factors):.2f} ({min(factors):.2f}-{max(factors):.2f})",
        "" if score is None else f"{score:.5g}",
        "yes" if same else "no",
        {True: "yes", False: "no"}.get(results["resumed"].get(way), "not measured"),
    ]


def source(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the cells of a project in the second table: where it comes from, and what was cut."""
    project = PROJECTS[name]
    link = f"https://github.com/{project.repository}" + (f"/tree/{project.commit}" if project.commit else "")
    label = f"{project.package} {results['version']}" + (f", files at {project.commit[:7]}" if project.commit else "")
    steps = results["fits"]["stock"][0]["steps"]
    return [name, project.trains, f"[{label}]({link})", project.license, project.data, project.cut, f"{steps:,}"]


def _set_variables(facts: Mapping[str, Any]) -> str:
    return " ".join(f"`{name}={value}`" for name, value in facts["environment"].items()) or "no variables set"


def page(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the Markdown page."""
    facts, rounds = describe_machine("cpu"), max(len(each["fits"]["stock"]) for each in results.values())
    loads = [cores for each in results.values() for cores in each["other_cores"] if cores is not None]
    dates = sorted({each["date"] for each in results.values()})
    commits = sorted({(each["commit"] or "unknown")[:8] for each in results.values()})
    only = "" if len(results) == len(PROJECTS) else f" --only {' '.join(results)}"
    versions = [f"{name} {found}" for name in ("torch", "lightning") if (found := installed_version(name))]
    busy = f"Other programs used {min(loads):.1f} to {max(loads):.1f} cores meanwhile." if loads else ""
    return [
        "# Public projects: whole fits as they are, and with this package\n",
        f"Command, on {' and '.join(dates)}: `python -m benchmarks projects --rounds {rounds}{only}`.",
        f"{facts['processor']} ({facts['cpu_capability']}), {facts['cores']} cores, {', '.join(versions)},",
        f"commit {' and '.join(commits)}, {_set_variables(facts)}. {busy}",
        "Seconds are of processor time, with threads, because it is that which other programs change least; the column",
        "by the wall shows what they did to it. Fits take turns; each cell is their median.\n",
        *markdown_table(COLUMNS, [row(name, each, way) for name, each in results.items() for way in WAYS]),
        "\nWhole: from `setup` to the end of `fit`. Training: all of it but the validations. Same weights: the bytes",
        "of all weights after the fit equal those of stock Lightning's first fit, in all fits. Resumed equal: in a new",
        "process a fit went on from the checkpoint of a process that ended after a step in the middle of an epoch, and",
        "its weights at the end equal those of the fit that never stopped.\n",
        *markdown_table(SOURCES, [source(name, each) for name, each in results.items()]),
    ]


def _check(names: Sequence[str], repositories: Path) -> None:
    """Raise an error that says what to install and to clone, if something of the projects is missing."""
    chosen = [PROJECTS[name] for name in names]
    missing = [each for each in chosen if installed_version(each.package) is None]
    if missing:
        words = [f"'{word}'" for each in missing for word in (each.distributions or (each.package,))]
        raise BenchError(
            f"expected {', '.join(each.package for each in missing)} to be installed. Run: pip install "
            f"{' '.join(words)}; or choose others with --only"
        )
    lacking = [each for each in chosen if each.parts and not (repositories / Path(each.repository).name).is_dir()]
    if lacking:
        clones = (f"git clone https://github.com/{each.repository} {repositories}" for each in lacking)
        lines = [f"{each}/{Path(one.repository).name}" for each, one in zip(clones, lacking, strict=True)]
        raise BenchError("\n".join(["--repositories: expected clones of all repositories. Run:", *lines]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the projects, and print two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks projects", description="Whole fits of public projects.")
    add = parser.add_argument
    add("--repositories", type=Path, default=Path("runs/repositories"), help="folder with the clones")
    add("--rounds", type=int, default=3, help="whole fits of each way (default: 3)")
    add("--only", nargs="+", choices=list(PROJECTS), default=list(PROJECTS), help="projects (default: all)")
    add("--out", type=Path, default=Path("runs/projects"), help="folder of the results (default: runs/projects)")
    add("--resume", action="store_true", help="keep the fits in --out, and make those that lack")
    add("--page", type=Path, help="also write the tables to this file")
    options = parser.parse_args(arguments)
    _check(options.only, options.repositories)
    found = {}
    with Progress() as progress:
        for number, name in enumerate(options.only, start=1):
            file = options.out / f"{name}.json"
            former = json.loads(file.read_text()) if options.resume and file.exists() else None

            def show(text: str, place: str = f"project {number} of {len(options.only)}") -> None:
                progress.show(f"{place}: {text}")

            save = functools.partial(write_json, path=file)
            found[name] = measure(PROJECTS[name], options.repositories.absolute(), options.rounds, show, save, former)
    print_lines(*page(found))
    if options.page is not None:
        options.page.write_text("\n".join([*page(found), ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
