"""Runs a user's script with a doctor in each of its Trainers, and leaves nothing of its own in the way."""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_turbo.doctor.schedule import Schedule
from lightning_turbo.errors import TurboError

if TYPE_CHECKING:
    from lightning_turbo.doctor.callback import Doctor

__all__ = ["doctors", "run"]

INTERRUPTED = 130

# What Lightning 1.x's Trainer took and Lightning 2's refuses.
LIGHTNING_1 = """
    amp_backend amp_level auto_lr_find auto_scale_batch_size auto_select_gpus automatic_optimization checkpoint_callback
    distributed_backend enable_pl_optimizer flush_logs_every_n_steps gpus ipus log_gpu_memory move_metrics_to_cpu
    multiple_trainloader_mode num_processes prepare_data_per_node process_position progress_bar_refresh_rate
    reload_dataloaders_every_epoch replace_sampler_ddp resume_from_checkpoint stochastic_weight_avg terminate_on_nan
    tpu_cores track_grad_norm truncated_bptt_steps weights_save_path weights_summary
"""

_settings: dict[str, Any] = {}
_made: list[Doctor] = []


def doctors() -> list[Doctor]:
    """Make the doctor for one more Trainer; Lightning calls this entry point for each Trainer that is made."""
    from lightning_turbo.doctor.callback import Doctor  # not before the script has chosen its copy of Lightning

    settings = dict(_settings)
    out = settings.pop("out", None)
    if out is None:
        return []
    name = "doctor" if not _made else f"doctor-{len(_made) + 1}"
    doctor = Doctor(**settings, html=out / f"{name}.html", json=out / f"{name}.json")
    _made.append(doctor)
    return [doctor]


def run(path: str | Path, argv: Sequence[str] = (), *, out: str | Path = "runs/doctor", **settings: Any) -> int:
    """Run a script as ``python path *argv`` would, with a ``Doctor`` in each Trainer that it makes.

    Lightning finds the doctor as it finds every plugin: by an entry point, which exists for this process only.
    Processes that the script starts for further ranks run without it.

    Args:
        path: The script.
        argv: Its arguments.
        out: The folder for ``doctor.html`` and ``doctor.json``; made if absent.
        settings: ``warmup``, ``timed``, ``watched`` and ``fix`` as for ``Doctor``.

    Returns:
        The script's own exit status: 1 after an exception, whose traceback is printed, 130 after Ctrl-C. In place of 0,
        1 if a report could not be written.

    Raises:
        TurboError: If there is no such script, or ``out`` cannot be a folder that reports are written to.
        TypeError: If a count of steps is no whole number.
        ValueError: If a count of steps is too small.
    """
    script = Path(path)
    if not script.is_file():
        raise TurboError(f"{str(path)!r} is no file; give the path of a Python script that trains with a Trainer.")
    script, folder = script.absolute(), Path(out).resolve()
    Schedule(**{key: value for key, value in settings.items() if key != "fix"})  # refuses before the script runs
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in _reports(folder, "html") + _reports(folder, "json"):
            old.unlink()
    except OSError as error:
        why = error.strerror or error
        raise TurboError(f"{str(out)!r} cannot be the folder of the report ({why}); name another place.") from error
    _made.clear()
    _settings.update(settings, out=folder)
    start = os.getcwd()  # the reader's, wherever the script goes
    try:
        with _entry_point(), _as_main(script, argv):
            status, error = _end_of(script)
    finally:
        _settings.clear()
    sys.stdout.flush()
    sys.stderr.write(_closing(script, folder, start, error))
    return status or int(bool(_unwritten()))


def _end_of(script: Path) -> tuple[int, BaseException | None]:
    """Run the script; return its exit status and the error that ended it."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0, None
        sys.stderr.write(f"{exit_.code}\n")
        return 1, None
    except BaseException as error:  # whatever ends the script ends it here, with its own traceback
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, error
    return 0, None


def _reports(folder: Path, suffix: str) -> list[Path]:
    return sorted(each for each in folder.glob(f"doctor*.{suffix}") if re.fullmatch(r"doctor(-\d+)?", each.stem))


def _unwritten() -> list[Doctor]:
    """The doctors that made a report which is not there."""
    return [
        doctor
        for doctor in _made
        if doctor.report is not None and not all(Path(file).is_file() for file in (doctor.html, doctor.json) if file)
    ]


def _closing(script: Path, folder: Path, start: str, error: BaseException | None) -> str:
    """The last words: where the report is, seen from ``start``, or why there is none."""
    told = [f"lightning-turbo doctor: report in {os.path.relpath(page, start)}\n" for page in _reports(folder, "html")]
    if _unwritten():
        told += [f"lightning-turbo doctor: a report could not be written to {folder}; the warning above says why.\n"]
    if told:
        return "".join(told)
    if any(doctor.superseded for doctor in _made):
        why = "its Trainer has a Doctor of its own, which reports by itself"
    elif error is not None:
        until = "its Trainer began to train" if _made else "it made a Trainer"
        why = f"it ended in {type(error).__name__} before {until}. {_remedy(error)}"
    elif not _made:
        why = "it made no Trainer. Give a script that makes a Trainer and calls fit"
    else:
        why = "its Trainer never began to train. Give a script that calls Trainer.fit"
    return f"lightning-turbo doctor: {script.name} was not examined: {why}.\n"


def _remedy(error: BaseException) -> str:
    unknown = re.search(r"Trainer\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if unknown and unknown[1] in LIGHTNING_1.split():
        return f"docs/migration.md says what takes the place of {unknown[1]!r}, an argument of Lightning 1.x"
    if isinstance(error, ImportError) and error.name == "apex":
        return "docs/migration.md says what takes the place of apex"
    return "Let it train for some steps" if isinstance(error, KeyboardInterrupt) else "Mend that first"


@contextmanager
def _entry_point() -> Iterator[None]:
    """Make ``doctors`` an entry point of Lightning, under both of its names, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "lightning_turbo_doctor-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-turbo-doctor\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "".join(
                f"[{name}.callbacks_factory]\nlightning-turbo-doctor = {__name__}:doctors\n"
                for name in ("lightning.pytorch", "pytorch_lightning")
            )
        )
        sys.path.append(folder)
        try:
            yield
        finally:
            if folder in sys.path:
                sys.path.remove(folder)


@contextmanager
def _as_main(script: Path, argv: Sequence[str]) -> Iterator[None]:
    """Give the script its own arguments and put its folder first on the path, a link's target's, as Python does."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv = before[0]
        sys.path[:] = before[1]
