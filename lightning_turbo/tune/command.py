"""The command ``lightning-turbo tune``, from settings to exit status."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TextIO

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import Interrupt, OtherLoad, Progress, count_cores, print_lines
from lightning_turbo.tune.candidates import list_candidates, select
from lightning_turbo.tune.report import as_text, make_results, write_results
from lightning_turbo.tune.runner import ScriptRunner, TuneSettings
from lightning_turbo.tune.search import Search

__all__ = ["run_tune"]


def run_tune(settings: TuneSettings, stream: TextIO | None = None) -> int:
    """Search, write the results, and show them.

    Args:
        settings: What to tune and how.
        stream: Where to print the results; ``None`` means standard output.

    Returns:
        Exit status: 0, even if nothing helps; 130 after Ctrl-C.

    Raises:
        TurboError: If the script cannot be measured, or the settings name no candidate.
    """
    candidates = select(list_candidates(count_cores()), settings.only)
    try:
        (settings.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TurboError(
            f"out={str(settings.out)!r}: {error.strerror or error}; expected a folder that can be made and written."
        ) from error
    interrupt = Interrupt(60 * settings.minutes)
    # Removed at the end, whatever the processes left in it.
    with tempfile.TemporaryDirectory(prefix="lightning-turbo-", ignore_cleanup_errors=True) as scratch:
        load, progress = OtherLoad(), Progress(interrupt.deadline)
        table = {each.name: each for each in candidates}
        runner = ScriptRunner(settings, table, interrupt, progress, Path(scratch))
        search = Search(candidates, runner, progress.say)
        with interrupt.caught(), progress:
            search.run()
        # The load of the processes is known once everything that started them has ended.
        results = make_results(search, settings.command, load.cores())
    paths = write_results(search, results, settings.out)
    print_lines(as_text(results), *map(str, paths), stream=stream)
    return 130 if interrupt.pressed else 0
