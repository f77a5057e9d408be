"""The command ``lightning-turbo tune``, from settings to exit status."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lightning_turbo._files import whole_file
from lightning_turbo.errors import TurboError
from lightning_turbo.measure import (
    Interrupt,
    OtherLoad,
    Progress,
    count_cores,
    describe_machine,
    print_lines,
    why_no_picture,
    write_json,
)
from lightning_turbo.tune.batch_size import BatchSizes
from lightning_turbo.tune.candidates import Baseline, Candidate, list_candidates, list_rank_candidates, select
from lightning_turbo.tune.epochs import compare_epochs, describe_epochs, train_epochs
from lightning_turbo.tune.report import as_text, describe_headroom, make_results, write_results
from lightning_turbo.tune.runner import ScriptRunner, TuneSettings
from lightning_turbo.tune.search import Search

__all__ = ["run_tune"]

STATE = "measured.json"  # --resume continues from this file


def run_tune(settings: TuneSettings, stream: TextIO | None = None) -> int:
    """Search, write the results, and show them.

    Args:
        settings: What to tune and how.
        stream: Where to print the results; ``None`` means standard output.

    Returns:
        Exit status: 0, even if nothing helps; 130 after Ctrl-C.

    Raises:
        TurboError: If the script cannot be measured, or the settings leave nothing to try.
    """
    candidates = select(_list(settings.ranks), settings.only, settings.without, settings.same_maths)
    origin, kept = _origin(settings), settings.out / STATE
    state = _read_state(kept, origin) if settings.resume else None
    _check(settings)
    interrupt = Interrupt(60 * settings.minutes)
    # Removed at the end, whatever the processes left in it.
    with tempfile.TemporaryDirectory(prefix="lightning-turbo-", ignore_cleanup_errors=True) as scratch:
        load = OtherLoad()
        progress, table = Progress(interrupt.deadline), {each.name: each for each in candidates}
        runner = ScriptRunner(settings, table, interrupt, progress, Path(scratch))
        with interrupt.caught(), progress, runner:
            if settings.batch_size:
                _tune_batch_size(runner, settings.out, stream)
                return 130 if interrupt.pressed else 0
            search = Search(candidates, runner, same_maths=settings.same_maths)
            search.on_headroom = lambda baseline: progress.say(describe_headroom(baseline))
            _run(search, state, kept, origin)
        # The load of the processes is known once everything that started them has ended.
        results = make_results(search, settings.command, load.cores())
        paths = write_results(search, results, settings.out)
        if settings.confirm and search.chosen.names and search.baseline is not None and not interrupt.pressed:
            # Results are already written, because an epoch may take any time.
            interrupt = Interrupt()
            results["epochs"] = _train_epochs(runner, search, search.baseline, interrupt)
            paths = write_results(search, results, settings.out)
    print_lines(as_text(results), *map(str, paths), *filter(None, [why_no_picture()]), stream=stream)
    return 130 if interrupt.pressed else 0


def _run(search: Search, state: Mapping[str, Any] | None, kept: Path, origin: Mapping[str, Any]) -> None:
    """Search, starting from an earlier state if there is one, and store the measurements."""
    if state is not None:
        with _expecting_state(kept):
            search.restore(state)
    try:
        search.run()
    finally:
        # Also if a process could not be started, or after a second Ctrl-C.
        if search.baseline is not None or search.interrupted:
            new = search.state()
            # Keep an earlier search's measurements of candidates that are not part of this one.
            alone = {**(state or {}).get("alone", {}), **new["alone"]}
            write_json({"of": origin, **new, "alone": alone}, kept)


def _train_epochs(runner: ScriptRunner, search: Search, baseline: Baseline, interrupt: Interrupt) -> dict[str, Any]:
    """Return the comparison of whole epochs, including a sentence."""
    seconds = (baseline.epoch_ms or 0.0) / 1e3
    with runner:
        found = train_epochs(runner, search.chosen, seconds, interrupt)
    epochs = compare_epochs(found, search.final)
    return {**epochs, "sentence": describe_epochs(epochs)}


def _list(ranks: int) -> list[Candidate]:
    cores = count_cores()
    return list_candidates(cores) if ranks == 1 else list_rank_candidates(cores, ranks)


def _tune_batch_size(runner: ScriptRunner, out: Path, stream: TextIO | None) -> None:
    sizes = BatchSizes(runner)
    sizes.run()
    with whole_file(out / "batch_size.md") as part:
        part.write_text(f"{sizes.as_text()}\n", encoding="utf-8")
    print_lines(sizes.as_text(), "", str(out / "batch_size.md"), stream=stream)


def _origin(settings: TuneSettings) -> dict[str, Any]:
    """Return what must be the same for a later run to continue."""
    program = _file_of_module(settings.program) if settings.module else Path(settings.program)
    script = "" if program is None else hashlib.sha256(program.read_bytes()).hexdigest()
    asked = {name: getattr(settings, name) for name in ("seed", "device", "ranks")}
    found = describe_machine("cpu")
    machine = {name: found[name] for name in ("processor", "cores", "python", "lightning_turbo", "versions")}
    return {"command": settings.command, "script": script, **asked, **machine}


def _file_of_module(name: str) -> Path | None:
    """Return the file that ``python -m`` runs; ``importlib`` would import its parent packages."""
    for place in ("", *sys.path):
        stem = Path(place, *name.split("."))
        for file in (stem.with_name(f"{stem.name}.py"), stem / "__main__.py"):
            if file.is_file():
                return file
    return None


@contextmanager
def _expecting_state(path: Path) -> Iterator[None]:
    """Report in one line that a file was not written by ``_run``."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TurboError(
            f"--resume: {path}: expected what this version of tune writes, got {type(error).__name__}: {error}. Leave "
            "--resume out to begin again."
        ) from error


def _read_state(path: Path, origin: Mapping[str, Any]) -> dict[str, Any]:
    if not path.is_file():
        raise TurboError(f"--resume: expected {path} of an earlier run. Leave it out, or name the folder by --out.")
    with _expecting_state(path):
        state = json.loads(path.read_text())
        of = state.pop("of")
        other = [name for name, value in origin.items() if of.get(name) != value]
    if other:
        raise TurboError(f"--resume: {path} has another {' and '.join(other)}. Leave --resume out to begin again.")
    return state


def _check(settings: TuneSettings) -> None:
    """Create the output folder, and raise an error for a device that does not exist."""
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise TurboError("device='cuda', but torch sees no CUDA device: expected 'cpu' or 'auto' here.")
    try:
        (settings.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TurboError(
            f"out={str(settings.out)!r}: {error.strerror or error}; expected a folder that can be made and written."
        ) from error
