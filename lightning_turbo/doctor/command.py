"""``lightning-turbo doctor SCRIPT``: runs a script with a Doctor in each Trainer and writes reports to a folder."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_turbo.doctor.facts import check_steps
from lightning_turbo.doctor.script import RANKS, check_script, run_program
from lightning_turbo.errors import TurboError

if TYPE_CHECKING:
    from lightning_turbo.doctor.callback import Doctor

__all__ = ["examine"]

NOT_EXAMINED = 3
"""The exit status if no Trainer started to train."""


def examine(
    program: str | Path,
    argv: Sequence[str] = (),
    *,
    module: bool = False,
    out: str | Path = "runs/doctor",
    keep_going: bool = False,
    **steps: Any,
) -> int:
    """Run a script or package with a ``Doctor`` in each of its Trainers, until the first report is complete.

    Args:
        program: The script, or with ``module`` the name of a module or package, as after ``python -m``.
        argv: Its arguments.
        module: Whether ``program`` is the name of a module.
        out: The folder for ``doctor.txt`` and ``doctor.json``; created if missing.
        keep_going: Whether the program runs to its end, as it always does with several ranks. Otherwise this process
            ends with it, and nothing after this call runs; see ``end_program``.
        steps: ``warmup``, ``timed`` and ``watched``, as in ``Doctor``.

    Returns:
        0 if the program was ended after a report, otherwise its own exit status: 1 after an exception, whose traceback
        is printed, 130 after Ctrl-C. Instead of 0, 1 if a report could not be written and 3 if nothing was examined.

    Raises:
        TurboError: If the script does not exist, or reports cannot be written to ``out``.
        ValueError: If a count of steps is too small.
    """
    folder = Path(out).resolve()  # resolved first: the script may change the directory
    start = os.getcwd()
    made = []

    def make_doctors() -> list[Any]:
        from lightning_turbo.doctor.callback import Doctor  # the script must choose its copy of Lightning first

        name = "doctor" if not made else f"doctor-{len(made) + 1}"
        page = folder / f"{name}.txt"
        data = folder / f"{name}.json"
        border = "wait" if keep_going else "cut"
        made.append(Doctor(**steps, text=page, json=data, stop=not keep_going, border=border))
        return made[-1:]

    def close(status: int) -> int:
        """Print what was written, and return the exit status, whether the program was ended or has ended by itself."""
        sys.stdout.flush()
        if any(not each.reports for each in made):
            return status  # under torchrun each rank is such a command; the first one prints
        written = [f"report in {os.path.relpath(page, start)}" for page in _reports(folder, "txt")]
        missing = sum(each.report is not None for each in made) > len(_reports(folder, "json"))
        failure = [f"a report could not be written to {folder}; the warning above says why."] if missing else []
        for line in [*written, *failure, *_end_of(Path(program).name, made, keep_going)]:
            sys.stderr.write(f"lightning-turbo doctor: {line}\n")
        return status or int(missing)

    check_steps(**steps)
    if not module:
        check_script(Path(program))
    _clear(folder, out)
    # Lightning starts further ranks as processes of the script; they find the entry point and this variable.
    os.environ[RANKS] = json.dumps(steps)
    if keep_going:
        sys.stderr.write(
            f"lightning-turbo doctor: --keep-going: {Path(program).name} runs to its own end, and the files that it "
            "writes are written.\n"
        )
    try:
        run = run_program(str(program), argv, make_doctors, module=module, at_end=close)
    finally:
        del os.environ[RANKS]
    status = close(run.status)
    if any(each.report is not None for each in made) or not all(each.reports for each in made):
        return status
    reason = f"{Path(program).name} was not examined: {_reason(made, run.error)}."
    sys.stderr.write(f"lightning-turbo doctor: {reason}\n")
    return status or (0 if any(each.superseded for each in made) else NOT_EXAMINED)


def _end_of(name: str, made: list[Doctor], keep_going: bool) -> list[str]:
    """Explain why a program did not run to its end, or did so without being asked to."""
    if any(each.stopped for each in made):
        why = "without its handlers (finally, on_exception, atexit) and what stands behind fit, so that they overwrite"
        return [f"{name} was ended after the report, {why} nothing; --keep-going lets it run to its own end."]
    if not keep_going and any(each.report is not None and each.report.facts.run.world_size > 1 for each in made):
        why = "because its other ranks would have waited for the first one"
        return [f"{name} ran to its own end, {why}: the files that it writes are written."]
    return []


def _clear(folder: Path, name: str | Path) -> None:
    """Create the folder, and remove the reports of an earlier run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in _reports(folder, "txt") + _reports(folder, "json"):
            old.unlink(missing_ok=True)  # several ranks under torchrun remove the same files
    except OSError as error:
        raise TurboError(
            f"out={str(name)!r}: expected a folder to write reports to ({error}); name another."
        ) from error


def _reports(folder: Path, suffix: str) -> list[Path]:
    return sorted(each for each in folder.glob(f"doctor*.{suffix}") if re.fullmatch(r"doctor(-\d+)?", each.stem))


def _reason(made: list[Doctor], error: BaseException | None) -> str:
    """Return the reason why there is no report."""
    if any(doctor.superseded for doctor in made):
        return "its Trainer has a Doctor of its own, which reports by itself"
    end = f"it ended in {type(error).__name__} before" if error is not None else "it ended before"
    return f"{end} a Trainer began to train. Give a script that makes a Trainer and calls fit"
