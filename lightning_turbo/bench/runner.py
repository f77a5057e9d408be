"""Running suites, one after another, into one set of results."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning_turbo
from lightning_turbo.bench.case import BenchError, Suite, load_suite
from lightning_turbo.bench.interleave import SuiteRun, work_of
from lightning_turbo.bench.interrupt import Interrupt
from lightning_turbo.bench.machine import describe_machine
from lightning_turbo.bench.progress import Progress
from lightning_turbo.bench.settings import BenchSettings

__all__ = ["FORMAT", "chosen_suites", "run_suites"]

FORMAT = 1  # of results.json; raised when a field changes its meaning


def chosen_suites(settings: BenchSettings) -> list[Suite]:
    """Return the suites that have a case to run, in order.

    Args:
        settings: What to choose.

    Raises:
        BenchError: If ``only`` matches no case of any suite.
    """
    suites = [suite for suite in (load_suite(n, settings.suites) for n in settings.names()) if settings.chosen(suite)]
    if not suites:
        raise BenchError(
            f"only={settings.only!r} matches no case; `lightning-turbo bench --list` shows their names. "
            "A pattern is as in a shell: 'O1*'."
        )
    return suites


def run_suites(
    settings: BenchSettings, *, save: Callable[[dict[str, Any]], object] = lambda results: None
) -> dict[str, Any]:
    """Measure the suites that the settings name.

    Cases are started side by side, then measured one after another, one round each, over and over; while one
    measures, all others are held still. A case that fails is reported in its row. Ctrl-C or SIGTERM ends the measuring
    and keeps what there is; a second one stops at once.

    Args:
        settings: What to measure and how.
        save: Called with the results so far after every sweep of rounds, and last of all at the end.

    Returns:
        The results in plain values, as ``results.json`` holds them.

    Raises:
        BenchError: If ``only`` matches no case of any suite.
    """
    suites = chosen_suites(settings)
    program = Path(sys.argv[0]).name
    results: dict[str, Any] = {
        "format": FORMAT,
        "lightning_turbo": lightning_turbo.__version__,
        "command": ["lightning-turbo" if program == "__main__.py" else program, *sys.argv[1:]],
        "settings": {
            "suite": settings.suite,
            "quick": settings.quick,
            "only": list(settings.only),
            "device": settings.device,
            "threads": settings.threads,
            "rounds": settings.rounds,
            "minutes": settings.minutes,
            "processes": settings.processes,
            "seed": settings.seed,
        },
        "machine": describe_machine(settings.device),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "finished": None,
        "interrupted": False,
        "not_run": [],
        "suites": [],
    }
    interrupt = Interrupt(settings.seconds)
    runs: list[SuiteRun] = []

    def keep() -> None:
        results.update(suites=[run.results() for run in runs], interrupted=interrupt.pressed)
        save(results)

    with interrupt.caught(), Progress(interrupt.deadline) as progress, tempfile.TemporaryDirectory() as folder:
        for number, suite in enumerate(suites):
            if interrupt.left < 0:
                results["not_run"].append(suite.name)
                progress.say(f"{suite.name}: not run, because no time is left for it")
                continue
            later = [work_of(each, settings) for each in suites[number + 1 :]]
            run = SuiteRun(suite, settings, Path(folder), progress, interrupt, later=later, save=keep)
            runs.append(run)
            progress.say(f"{suite.name}: {len(run.chosen)} cases")
            try:
                run.run()
            except KeyboardInterrupt:
                interrupt.pressed = True
            keep()
            if interrupt.pressed:
                break
    results["finished"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    keep()
    return results
