"""``lightning-turbo doctor SCRIPT``: runs a script with a Doctor in each Trainer, and ends it with the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_turbo.doctor.script import check_script, run_program
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
    json: str | Path | None = None,
    keep_going: bool = False,
    **given: Any,
) -> int:
    """Run a script or package with a ``Doctor`` in each of its Trainers, until the first report is complete.

    Args:
        program: The script, or with ``module`` the name of a module or package, as after ``python -m``.
        argv: Its arguments.
        module: Whether ``program`` is the name of a module.
        json: The file for the report as JSON; its folder is created, and a second Trainer's is ``NAME-2.json``.
        keep_going: Whether the program runs to its end, as it always does with several ranks. Otherwise this process
            ends with it, and nothing after this call runs; see ``end_program``.
        given: Further arguments of ``Doctor``.

    Returns:
        0 if the program was ended after a report, otherwise its own exit status: 1 after an exception, whose traceback
        is printed, 130 after Ctrl-C. Instead of 0, 1 if a report could not be written and 3 if nothing was examined.

    Raises:
        TurboError: If the script does not exist, or the report cannot be written to ``json``.
        ValueError: If an argument of ``Doctor`` is out of range.
    """
    name = Path(program).name
    path = None if json is None else Path(json).resolve()  # the script may change the directory
    made: list[Doctor] = []

    def make_doctors() -> list[Any]:
        from lightning_turbo.doctor.callback import Doctor  # the script must choose its copy of Lightning first

        own = path if path is None or not made else path.with_stem(f"{path.stem}-{len(made) + 1}")
        made.append(Doctor(**given, json=own, stop=not keep_going))
        return made[-1:]

    def close(status: int) -> int:
        """Say what became of the program and the report, and return the exit status."""
        sys.stdout.flush()
        if any(not each.reports for each in made):
            return status  # under torchrun each rank is such a command; the first one prints
        written = [Path(each.json).exists() for each in made if each.report is not None and each.json is not None]
        missing = not all(written)
        failure = ["the report could not be written; the warning above says why."] if missing else []
        for line in [*failure, *_end_of(name, made, keep_going)]:
            sys.stderr.write(f"lightning-turbo doctor: {line}\n")
        return status or int(missing)

    if not module:
        check_script(Path(program))
    if path is not None:
        _make_room(path)
    run = run_program(str(program), argv, make_doctors, module=module, at_end=close)
    status = close(run.status)
    if any(each.report is not None for each in made) or not all(each.reports for each in made):
        return status
    reason = f"{name} was not examined: {_reason(made, run.error)}."
    sys.stderr.write(f"lightning-turbo doctor: {reason}\n")
    return status or (0 if any(each.superseded for each in made) else NOT_EXAMINED)


def _end_of(name: str, made: list[Doctor], keep_going: bool) -> list[str]:
    """Explain why a program did not run to its end, or did so without being asked to."""
    if any(each.stopped for each in made):
        why = "without its handlers (finally, on_exception, atexit) and what stands behind fit"
        return [f"{name} was ended after the report, {why}; --keep-going lets it run to its own end."]
    if keep_going or not any(each.report is not None for each in made):
        return []
    if any(each.report is not None and each.report.facts.run.world_size > 1 for each in made):
        why = "because its other ranks would have waited for the first one"
    else:
        why = "because it ended, or trained longer than the minutes, before everything was seen"
    return [f"{name} ran to its own end, {why}."]


def _make_room(path: Path) -> None:
    """Create the folder of a report, and remove the report of an earlier run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # several ranks under torchrun remove the same file
    except OSError as error:
        raise TurboError(f"json={str(path)!r}: expected a file to write to ({error}); name another.") from error


def _reason(made: list[Doctor], error: BaseException | None) -> str:
    """Return the reason why there is no report."""
    if any(doctor.superseded for doctor in made):
        return "its Trainer has a Doctor of its own, which reports by itself"
    end = f"it ended in {type(error).__name__} before" if error is not None else "it ended before"
    return f"{end} a Trainer began to train. Give a script that makes a Trainer and calls fit"
