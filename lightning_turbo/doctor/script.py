"""Runs a user's script or package as Python would, with our callbacks in each Trainer that it creates.

Lightning finds the callbacks like any plugin: through an entry point. The entry point exists only for the time of the
run. Nothing is patched. Call these functions in a fresh process, because the script
may change anything in it, and because ``end_program`` ends it.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_turbo.doctor.ending import ended_by
from lightning_turbo.errors import TurboError

if TYPE_CHECKING:  # the script chooses which copy of Lightning it imports
    from lightning_turbo._lightning import Callback

__all__ = ["Ending", "check_script", "make_callbacks", "run_program"]

INTERRUPTED = 130  # as shells do
_factories: list[Callable[[], list[Callback]]] = []


@dataclass(frozen=True, slots=True)
class Ending:
    """How a script ended.

    Attributes:
        status: Its exit status: 1 after an exception, 130 after Ctrl-C.
        error: The exception that ended it, whose traceback was printed; ``None`` if there was none or it was
            ``sys.exit``.
    """

    status: int = 0
    error: BaseException | None = None


def run_program(
    program: str,
    argv: Sequence[str],
    callbacks: Callable[[], list[Callback]],
    *,
    module: bool = False,
    at_end: Callable[[int], int] = lambda status: status,
) -> Ending:
    """Run a script as ``python program *argv`` would, or a module or package as ``python -m program *argv``.

    Args:
        program: Path of the script, or name of the module.
        argv: Its arguments.
        callbacks: Called for each Trainer that the program creates; returns callbacks to add to that Trainer.
        module: Whether ``program`` is a name.
        at_end: Called with a status if ``end_program`` ends the program; writes the results and returns the exit status
            of this process. Nothing after this function runs then.

    Returns:
        How the program ended. Its errors and its ``sys.exit`` are caught here.

    Raises:
        TurboError: If the file does not exist.
    """
    if not module:
        check_script(Path(program))
    # Like Python, put the folder of the script first on the path, after resolving a link.
    script = "" if module else str(Path(program).absolute())
    folder = Path.cwd() if module else Path(script).resolve().parent
    process = os.getpid()
    with ExitStack() as put_in:
        put_in.enter_context(_add_callbacks(callbacks))
        put_in.enter_context(_as_main([script or program, *argv], str(folder)))
        put_in.enter_context(ended_by(at_end, put_in))
        if module:
            ending = _end_of(lambda: runpy.run_module(program, run_name="__main__", alter_sys=True), "")
        else:
            ending = _end_of(lambda: runpy.run_path(script, run_name="__main__"), script)
        if os.getpid() != process:
            # A copy that the program has forked ends here, as under Python; the program itself goes on.
            sys.exit(ending.status)
    return ending


def check_script(path: Path) -> None:
    """Raise an error if a path is not a file."""
    if not path.is_file():
        raise TurboError(f"{str(path)!r} is not a file; give the path of a Python script that trains with a Trainer.")


def make_callbacks() -> list[Callback]:
    """Return the callbacks for another Trainer; the entry point that Lightning calls. None outside a run."""
    return [callback for factory in _factories for callback in factory()]


def _end_of(run: Callable[[], object], file: str) -> Ending:
    try:
        run()
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return Ending(exit_.code or 0)
        sys.stderr.write(f"{exit_.code}\n")
        return Ending(1)
    except BaseException as error:  # anything that ends the script is caught, with its traceback
        frames = error.__traceback__
        while frames is not None and file and frames.tb_frame.f_code.co_filename != file:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return Ending(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, error)
    return Ending()


@contextmanager
def _add_callbacks(callbacks: Callable[[], list[Callback]]) -> Iterator[None]:
    """Make ``make_callbacks`` an entry point of Lightning, under both of its names, in this process."""
    with _folder_of_process() as folder:
        info = Path(folder) / "lightning_turbo_script-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-turbo-script\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "".join(
                f"[{name}.callbacks_factory]\nlightning-turbo-script = {__name__}:make_callbacks\n"
                for name in ("lightning.pytorch", "pytorch_lightning")
            )
        )
        sys.path.append(folder)
        _factories.append(callbacks)
        try:
            yield
        finally:
            _factories.remove(callbacks)
            if folder in sys.path:
                sys.path.remove(folder)


@contextmanager
def _folder_of_process() -> Iterator[str]:
    """Create a temporary folder, which copies of this process that end earlier leave alone."""
    process, folder = os.getpid(), tempfile.mkdtemp()
    try:
        yield folder
    finally:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _as_main(argv: list[str], folder: str) -> Iterator[None]:
    """Give a program its own arguments, and put its folder first on the path."""
    before = sys.argv, list(sys.path)
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = before[0]
        sys.path[:] = before[1]
