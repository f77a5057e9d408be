"""``python -m benchmarks projects``: whole fits of public projects, as they are and with this package.

Each project is installed from the package index. Its scripts and data come from a clone of its repository in the folder
``--repositories``; a fit runs in an empty folder with a copy of the part that it needs. ``lightning-turbo tune`` looks
at the script once. The fits of stock Lightning, of ``strategy="turbo"`` with ``Prefetch()`` and of what ``tune``
recommends, if anything, take turns. Then each is stopped after a step in the middle and resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.clones import environment, extract
from benchmarks.suite import BenchError
from lightning_turbo._optional import installed_version
from lightning_turbo.measure import (
    OtherLoad,
    Progress,
    count_cores,
    describe_machine,
    markdown_table,
    print_lines,
    three_digits,
    write_json,
)
from lightning_turbo.tune.candidates import Settings, combine, list_candidates

__all__ = ["PROJECTS", "WAYS", "Project", "main", "measure", "page", "row"]

WAYS = {"stock": "stock Lightning", "turbo": 'strategy="turbo", Prefetch()', "tune": "tune"}
COLUMNS = (
    "Project",
    "With",
    "Fits",
    "Whole, s",
    "Training, s",
    "A step, ms",
    "Validation, s",
    "Times as fast (lowest and highest pair)",
    "Processor, s",
    "By the processor",
    "Score",
    "Same weights as stock",
    "Resumed equal",
)
SAID = ("Project", "Minutes", "What `tune` said")
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
        prepare: Arguments of ``benchmarks.project_scripts`` that make its data, in the folder of the fit.
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
    prepare: tuple[str, ...] = ()
    score: str
    max_epochs: int | None = None


DATA = "tests/data/regression/mol/mol.csv"
CHEMPROP = f"train -i {DATA} -t regression --epochs 20 --accelerator cpu -n 0 --pytorch-seed 0 -o out"
L7IRISH = ("tests/conf/l7irish.yaml", "tests/data/l7irish/data.py")
TORCHGEO = f"fit --config {L7IRISH[0]} --data.batch_size 8 --data.patch_size 64 --data.length 120"
TORCHGEO += " --trainer.max_epochs 2 --trainer.accelerator cpu"
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
    "torchgeo": Project(
        package="torchgeo",
        repository="torchgeo/torchgeo",
        commit="65507dcbc4a51fdb49940508de77a5d5e2327eb3",
        parts=L7IRISH,
        license="MIT",
        trains=f"a U-Net that finds clouds: `torchgeo fit --config {L7IRISH[0]}`",
        data="five random Landsat scenes in GeoTIFF, by its own `l7irish/data.py`",
        cut="scenes of 384 pixels in place of 36; batches of 8 chips of 64 pixels in place of one of 32, 15 an epoch; "
        "2 epochs",
        prepare=("l7irish",),
        arguments=("torchgeo", *TORCHGEO.split()),
        score="val_MulticlassAccuracy",  # its loss is NaN: the last chip lies outside of the scene
    ),
    "gluonts": Project(
        package="gluonts",
        distributions=("gluonts[torch]",),
        repository="awslabs/gluonts",
        license="Apache-2.0",
        trains="a feed-forward network of time series: `SimpleFeedForwardEstimator(...).train(data)`",
        data="synthetic, by its own `ComplexSeasonalTimeSeries`: 100 series",
        cut="20 epochs of 50 batches, each with a validation",
        arguments=("gluonts",),
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
        recommended: Names of the settings that ``tune`` recommends.
    """

    project: Project
    repositories: Path
    show: Callable[[str], None]
    recommended: Sequence[str] = ()

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield a new folder with the part of the repository that the project needs, and the data that it makes."""
        with tempfile.TemporaryDirectory(prefix="project-", ignore_cleanup_errors=True) as name:
            if self.project.parts:
                extract(self.repositories, self.project.repository, self.project.commit, self.project.parts, Path(name))
            if self.project.prepare:
                self._python("benchmarks.project_scripts", self.project.prepare, Path(name))
            yield Path(name)

    def _python(self, module: str, arguments: Sequence[str], folder: Path, **variables: str) -> None:
        """Run a module in a folder; an error has the end of its output."""
        ended = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=folder, env=environment(MPLBACKEND="Agg", **variables), check=False, capture_output=True,
            text=True, errors="replace",
        )  # fmt: skip
        if ended.returncode:
            end = "\n".join(ended.stderr.splitlines()[-8:])
            raise BenchError(f"{self.project.package}: {module} ended with exit status {ended.returncode}:\n{end}")

    def tune(self, minutes: float) -> dict[str, Any]:
        """Run ``lightning-turbo tune`` on the script, and return what the page shows of its ``tune.json``."""
        self.show(f"{self.project.package}: tune, {minutes:g} minutes")
        program = ["-m", self.project.module, *self.project.arguments]
        with self.folder() as folder, tempfile.TemporaryDirectory() as out:
            self._python("lightning_turbo", ["tune", "--minutes", str(minutes), "--out", out, *program], folder)
            said = json.loads(Path(out, "tune.json").read_text())
        return {"minutes": minutes, "settings": said["chosen"]["settings"], "verdict": said["verdict"]}

    def settings(self, way: str) -> Settings:
        """Return the settings of a way."""
        if way == "tune":
            return combine(each for each in list_candidates(count_cores()) if each.name in self.recommended)
        # Not by PL_TRAINER_STRATEGY: a subclass of Trainer and LightningCLI do not read it.
        turbo = Settings(strategy={"exact_resume": True}, callbacks={"Prefetch": {}})  # the strategy with its defaults
        return turbo if way == "turbo" else Settings()

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
        settings = self.settings(way)
        task = {
            "program": [project.module, *project.arguments],
            "settings": dataclasses.asdict(settings),
            "score": project.score,
            "max_epochs": project.max_epochs,
            "stop": stop,
            "resume": None if resume is None else str(resume),
            "out": str(out),
        }
        self._python("benchmarks.project_run", [json.dumps(task)], folder, **settings.environment)
        if not out.exists():
            raise BenchError(f"{project.package}: expected that its script calls fit; it ended without, {WAYS[way]}")
        return {} if stop is not None else json.loads(out.read_text())

    def whole(self, way: str) -> dict[str, Any]:
        """Run a whole fit in a new folder."""
        self.show(f"{self.project.package}: a whole fit, {WAYS[way]}")
        with self.folder() as folder:
            return self.run(way, folder)

    def resumed(self, way: str, whole: Mapping[str, Any]) -> bool:
        """Stop a fit in the middle, resume it, and return whether its weights equal those of a whole fit."""
        stop = whole["steps"] // 2
        stop += stop % (whole["steps"] // whole["epochs"]) == 0  # not at the border of an epoch, if it has several
        self.show(f"{self.project.package}: stopped after step {stop} and resumed, {WAYS[way]}")
        with self.folder() as first, self.folder() as second:
            self.run(way, first, stop=stop)
            return self.run(way, second, resume=first / "fit.ckpt")["digest"] == whole["digest"]


def measure(
    project: Project,
    repositories: Path,
    rounds: int,
    minutes: float,
    show: Callable[[str], None],
    save: Callable[[dict[str, Any]], object],
    former: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Ask ``tune``, run the whole fits of a project in turns, then one of each way that is stopped and resumed.

    Args:
        project: The project.
        repositories: Folder with the clones.
        rounds: Whole fits of each way.
        minutes: Time of ``tune``.
        show: Told what runs.
        save: Called with the results so far after each fit.
        former: Results to go on from.

    Returns:
        What ``tune`` said, the fits and the answers by the names of the ways, and how many cores other programs used
        during each. Where ``tune`` recommends nothing, there are no fits of that way.
    """
    fits = Fits(project, repositories, show)
    found: dict[str, Any] = {"fits": {way: [] for way in WAYS}, "resumed": {}, "other_cores": []}
    found |= {"dates": [], "commits": [], "version": installed_version(project.package), **(former or {})}
    commit = (describe_machine("cpu")["commit"] or "unknown")[:8]

    def keep() -> None:
        found["dates"] = sorted({*found["dates"], f"{datetime.now(timezone.utc):%Y-%m-%d}"})
        found["commits"] = sorted({*found["commits"], commit})
        save(found)

    if "tune" not in found:
        found["tune"] = fits.tune(minutes)
        keep()
    fits.recommended = found["tune"]["settings"]
    ways = [way for way in WAYS if way != "tune" or fits.recommended]
    for number in range(rounds):
        for way in (ways, reversed(ways))[number % 2]:
            if len(found["fits"][way]) <= number:
                load = OtherLoad()
                found["fits"][way].append(fits.whole(way))
                found["other_cores"].append(load.cores())
                keep()
    for way in ways:
        if way not in found["resumed"]:
            found["resumed"][way] = fits.resumed(way, found["fits"][way][0])
            keep()
    return found


def _median(fits: Sequence[Mapping[str, Any]], part: str, clock: str = "wall") -> float:
    return statistics.median(fit[part][clock] for fit in fits)


def quotients(results: Mapping[str, Any], way: str, clock: str) -> list[float]:
    """Return the time of stock Lightning's fits divided by that of the fits of a way beside them."""
    pairs = zip(results["fits"]["stock"], results["fits"][way], strict=True)
    return [stock["whole"][clock] / fit["whole"][clock] for stock, fit in pairs]


def _factors(results: Mapping[str, Any], way: str, clock: str) -> str:
    factors = quotients(results, way, clock)
    return "" if way == "stock" else f"{statistics.median(factors):.2f} ({min(factors):.2f}-{max(factors):.2f})"


def row(name: str, results: Mapping[str, Any], way: str) -> list[str]:
    """Return the cells of a project and a way in the first table."""
    fits, stock = results["fits"][way], results["fits"]["stock"][0]
    recommended = " + ".join(results["tune"]["settings"]) or "nothing recommended"
    label = f"`tune`: {recommended}" if way == "tune" else WAYS[way]
    if not fits:
        return [name, label, *[""] * (len(COLUMNS) - 2)]
    training = statistics.median(fit["whole"]["wall"] - fit["validation"]["wall"] for fit in fits)
    score = fits[0]["score"]
    same = all(fit["digest"] == stock["digest"] for fit in fits)
    return [
        name,
        label,
        str(len(fits)),
        three_digits(_median(fits, "whole")),
        three_digits(training),
        three_digits(1e3 * training / stock["steps"]),
        three_digits(_median(fits, "validation")),
        _factors(results, way, "wall"),
        three_digits(_median(fits, "whole", "processor")),
        _factors(results, way, "processor"),
        "" if score is None else f"{score:.5g}",
        "yes" if same else "no",
        {True: "yes", False: "no"}.get(results["resumed"].get(way), "not measured"),
    ]


def said(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the cells of a project in the second table: what ``lightning-turbo tune`` said of its script."""
    return [name, f"{results['tune']['minutes']:g}", results["tune"]["verdict"]]


def source(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the cells of a project in the third table: where it comes from, and what was cut."""
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
    dates, commits = (sorted({*chain(*(each[key] for each in results.values()))}) for key in ("dates", "commits"))
    options = f"--rounds {rounds} --minutes {max(each['tune']['minutes'] for each in results.values()):g}"
    only = "" if len(results) == len(PROJECTS) else f" --only {' '.join(results)}"
    versions = [f"{name} {found}" for name in ("torch", "lightning") if (found := installed_version(name))]
    busy = f"Other programs used {min(loads):.1f} to {max(loads):.1f} cores meanwhile." if loads else ""
    return [
        "# Public projects: whole fits as they are, and with this package\n",
        f"Command, on {' and '.join(dates)}: `python -m benchmarks projects {options}{only}`.",
        f"{facts['processor']} ({facts['cpu_capability']}), {facts['cores']} cores, {', '.join(versions)},",
        f"commit {' and '.join(commits)}, {_set_variables(facts)}. {busy}",
        "Fits take turns; each cell is their median. The processor's seconds are those of all threads and processes of",
        "a fit: other programs change them less, and what overlaps does not shorten them.\n",
        *markdown_table(COLUMNS, [row(name, each, way) for name, each in results.items() for way in WAYS]),
        "\nWhole: from `setup` to the end of `fit`. Training: all of it but the validations. Same weights: the bytes",
        "of all weights after the fit equal those of stock Lightning's first fit, in all fits. Resumed equal: in a new",
        "process a fit went on from the checkpoint of a process that ended after a step in the middle of an epoch, and",
        "its weights at the end equal those of the fit that never stopped.\n",
        *markdown_table(SAID, [said(name, each) for name, each in results.items()]),
        "",
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
    """Measure the projects, and print three tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks projects", description="Whole fits of public projects.")
    add = parser.add_argument
    add("--repositories", type=Path, default=Path("runs/repositories"), help="folder with the clones")
    add("--rounds", type=int, default=3, help="whole fits of each way (default: 3)")
    add("--minutes", type=float, default=5, help="time of tune, which each script gets once (default: 5)")
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
            found[name] = measure(
                PROJECTS[name], options.repositories.absolute(), options.rounds, options.minutes, show, save, former
            )
    print_lines(*page(found))
    if options.page is not None:
        options.page.write_text("\n".join([*page(found), ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
