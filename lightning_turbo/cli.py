"""The command ``lightning-turbo``: it parses arguments and calls the functions that do the work."""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import lightning_turbo
from lightning_turbo._checks import expect, suggest
from lightning_turbo.errors import TurboError, TurboWarning

__all__ = ["main"]

Commands: TypeAlias = "argparse._SubParsersAction[Any]"

REFUSED = 2  # as argparse does
INTERRUPTED = 130  # as shells do


class _Parser(argparse.ArgumentParser):
    """A parser that shows examples, and suggests the nearest name for an unknown command or option."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_help(self) -> str:
        lines = "".join(f"\n  {self.prog} {example}" for example in self.examples)
        return super().format_help() + (f"\nexamples:{lines}\n" if lines else "")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        # Otherwise argparse would report a command's unknown options through the parser of all commands.
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggest(unknown[0], self._option_string_actions)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += suggest(choice[1], re.findall(r"[\w-]+", choice[2]))
        super().error(f"{message}{'' if message.endswith('?') else '.'} Try: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The command line arguments; ``None`` takes them from ``sys.argv``.

    Returns:
        0 for success, 1 for a result that fails the check, 2 for invalid input or a file that cannot be read or
        written, 130 after Ctrl-C.
    """
    parser = _Parser(
        prog="lightning-turbo",
        description="Find what slows down a PyTorch Lightning training script and what speeds it up, pack its "
        "data, and convert old checkpoints. COMMAND --help describes one command.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-turbo {lightning_turbo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Each command imports its modules when it runs, so that help and argument errors appear at once.
    _add_pack(commands)
    _add_convert(commands)
    _add_doctor(commands)
    _add_tune(commands)
    arguments = parser.parse_args(argv)
    # Some versions of argparse drop the "--" before the script's arguments, some pass it on.
    arguments.separated = "--" in (sys.argv[1:] if argv is None else argv)
    # Expected errors are reported in one line. Any other error is a bug of this package and keeps its traceback.
    try:
        return arguments.run(arguments)
    except (TurboError, OSError) as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        print("lightning-turbo: stopped", file=sys.stderr)
        return INTERRUPTED


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        examples=("train.py -- --max_epochs 1", "--json report.json --minutes 2 -m package fit"),
        help="check this machine, or find what slows down a training script",
        description="Without a script: check the installed packages and the machine; the exit status is 1 if a check "
        "fails. With a script, such as train.py or a console script: run it with a Doctor in each of its Trainers "
        "until one has seen enough, print its report, and end the script without its exit handlers. Several ranks, "
        "and a run that has trained longer than the minutes, run on. The exit status is the script's own if it ends by "
        "itself, 1 if a report could not be written, and 3 if no Trainer started training.",
        usage="%(prog)s | %(prog)s [--json FILE] [--minutes N] [--keep-going] [-m] SCRIPT [-- ARGUMENT ...]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="minutes in which the end of the first epoch is waited for (default: 5)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        default=None,
        help="let the script run to its end after the report: exit handlers run",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", default=None, help="SCRIPT is a module, as in python -m"
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a script that trains with a Trainer")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the script's own arguments")
    parser.set_defaults(run=_doctor, options=tuple(parser._option_string_actions))


def _doctor(arguments: argparse.Namespace) -> int:
    names = ("module", "json", "minutes", "keep_going")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.script is None:
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            return _refused(
                f"{options}: expected a script to run as well, got none. Add SCRIPT, or leave out {options}."
            )
        from lightning_turbo.doctor import environment

        lines = environment.check()
        print(environment.as_text(lines))
        return 1 if environment.failed(lines) else 0
    from lightning_turbo.doctor.command import examine

    if given.get("minutes", 0.0) < 0:
        return _refused(f"--minutes: expected 0 minutes or more, got {given['minutes']:g}.")
    own = _arguments_of_script("doctor", arguments.script, arguments)
    return examine(arguments.script, own, **given)


def _arguments_of_script(command: str, script: str, arguments: argparse.Namespace) -> list[str]:
    """Return the script's arguments as Python passes them; point out those that are options of this command.

    After ``--`` nothing is pointed out, because the user has marked the script's arguments.
    """
    behind = arguments.arguments[arguments.arguments[:1] == ["--"] :]
    if arguments.separated:
        return behind
    # They may be the script's own options with the same name, so this is not an error.
    ours = dict.fromkeys(name for word in behind if (name := word.partition("=")[0]) in arguments.options)
    if ours:
        print(
            f"lightning-turbo {command}: {', '.join(ours)} went to {script}, because arguments after a script are "
            f"passed to it; put options of {command} first: lightning-turbo {command} {' '.join(ours)} ... {script}",
            file=sys.stderr,
        )
    return behind


def _add_convert(commands: Commands) -> None:
    parser = commands.add_parser(
        "convert",
        examples=("old.ckpt new.ckpt", "apex.pt new.ckpt --prefix model."),
        help="turn an old apex or Lightning 1.x checkpoint for Lightning 2",
        description="Turn a checkpoint of a plain apex script ({'model', 'optimizer', 'amp'}) or of any version of "
        "Lightning into one that Trainer.fit(ckpt_path=NEW) resumes, with its loss scale. OLD is never changed. NEW "
        "must not exist.",
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="the file to read")
    parser.add_argument("new", type=Path, metavar="NEW", help="the file to write")
    parser.add_argument("--prefix", metavar="TEXT", help="plain files: prefix for the names of weights, such as model.")
    parser.add_argument("--trust", action="store_true", help="unpickle objects in OLD, which can run any code")
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from lightning_turbo.amp.convert import convert_checkpoint

    # On a command line the source line of a warning is noise.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TurboWarning)
        new = convert_checkpoint(arguments.old, arguments.new, prefix=arguments.prefix, trust=arguments.trust)
    for warning in caught:
        print(f"lightning-turbo: warning: {warning.message}", file=sys.stderr)
    print(f"wrote {new}")
    return 0


def _add_pack(commands: Commands) -> None:
    parser = commands.add_parser(
        "pack",
        examples=(
            "photos packed --size 224x224",
            "LiTS packed --pairs 'volume-{case}.nii' 'segmentation-{case}.nii' --workers 2",
        ),
        help="pack a folder of images or volumes into memory-mapped arrays",
        description="Pack the images, .npy or NIfTI volumes in FOLDER, as they are or resized, for PackedDataset and "
        "PatchDataset. Subfolders are classes. Folders of nnU-Net and the Medical Segmentation Decathlon are read as "
        "they are. Hidden files are skipped. OUT appears once everything is in it.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to read; it is not changed")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--labels",
        metavar="FOLDER|none",
        help="folder with a label volume of the same name for each volume; none: pack each file as a sample",
    )
    parser.add_argument(
        "--pairs",
        nargs="+",
        metavar=("TABLE.csv|IMAGES", "LABELS"),
        help="which files belong together: a CSV file with a column label, or two patterns with {case}, for images "
        "(A,B: two channels) and label volumes (or none); printed before anything is packed",
    )
    parser.add_argument(
        "--spacing", type=_distances, metavar="DxHxW", help="resample NIfTI files to this spacing in mm, e.g. 1x1x1.5"
    )
    parser.add_argument(
        "--size",
        type=_size,
        metavar="HxW",
        help="resize images (224x224), or crop and pad volumes (96x96x64) (default: as they are)",
    )
    parser.add_argument("--mode", choices=("RGB", "L"), help="color or grayscale (default: L if every image is gray)")
    parser.add_argument(
        "--classes", type=_names, metavar="A,B,...", help="all classes, in the order of their indices (default: sorted)"
    )
    parser.add_argument(
        "--compress", type=_size, metavar="DxHxW", help="compress volumes in chunks; best: the patch size"
    )
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="reader processes (default: 0)")
    parser.add_argument(
        "--skip-broken", action="store_true", help="skip files that cannot be packed and list them in OUT.broken.txt"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.set_defaults(run=_pack)


def _pack(arguments: argparse.Namespace) -> int:
    from lightning_turbo.data.packed.pack_files import pack_folder

    names = ("labels", "spacing", "size", "mode", "classes", "skip_broken", "overwrite")
    options = {name: getattr(arguments, name) for name in names}
    options["labels"] = False if arguments.labels == "none" else arguments.labels
    options |= {"compress": arguments.compress or False, "num_workers": arguments.workers}
    try:
        # On a command line the source line of a warning is noise.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TurboWarning)
            options["pairs"] = _pairs(arguments.pairs)
            found = pack_folder(arguments.folder, arguments.out, progress=_show_progress(), **options)
    except ValueError as error:
        return _refused(str(error))
    for warning in caught:
        print(f"lightning-turbo: warning: {warning.message}", file=sys.stderr)
    with_labels = " with label volumes" if found["foreground"] else ""
    with_classes = f", {len(found['classes'])} classes" if found["classes"] else ""
    print(f"{arguments.out}: {found['samples']} samples{with_labels}{with_classes}")
    if found["skipped"]:
        print(f"{arguments.out}.broken.txt: {found['skipped']} files were skipped")
    return 0


def _pairs(words: list[str] | None) -> Any:
    """Return what ``pack_folder(pairs=)`` takes: the path of a table, or patterns."""
    if words is None or len(words) == 1:
        return words and words[0]
    images, *labels = words
    are_patterns = len(labels) == 1 and "{case}" in images
    expect(are_patterns, "--pairs", words, "two patterns with {case}, IMAGES and LABELS, or the path of a CSV file")
    return tuple(images.split(",")), None if labels == ["none"] else labels[0]


def _show_progress() -> Callable[[int, int], None]:
    """Return a function that draws a progress bar with the remaining time, on a terminal only."""
    begun = time.monotonic()

    def show(done: int, total: int) -> None:
        left = (time.monotonic() - begun) * (total - done) / done
        bar = "#" * (30 * done // total)
        end = "\n" if done == total else ""
        print(f"\r[{bar:30}] {done}/{total} files, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else lambda done, total: None


def _size(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise argparse.ArgumentTypeError(
            f"size {text!r}: expected HEIGHTxWIDTH in pixels, such as 224x224, or DEPTHxHEIGHTxWIDTH in voxels"
        )
    return tuple(int(part) for part in text.split("x"))


def _distances(text: str) -> tuple[float, ...]:
    if not re.fullmatch(r"\d*\.?\d+(x\d*\.?\d+){2}", text):
        raise argparse.ArgumentTypeError(f"spacing {text!r}: expected DEPTHxHEIGHTxWIDTH in mm, such as 1x1x1.5")
    return tuple(float(part) for part in text.split("x"))


def _refused(why: str) -> int:
    print(f"lightning-turbo: error: {why}", file=sys.stderr)
    return REFUSED


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _add_tune(commands: Commands) -> None:
    parser = commands.add_parser(
        "tune",
        examples=("--minutes 5 train.py --max_epochs 1", "--only 'workers-*',fused -m package fit"),
        help="measure which settings make a training script faster, and write them down",
        description="Run a script in fresh processes for some steps of fit, with one setting at a time and then with "
        "those that help together, and compare the result with the script as it is over whole epochs. The script is "
        "not edited. Prints the lines to change; writes tune.json and, for LightningCLI, turbo.yaml. Ctrl-C keeps the "
        "results so far. That nothing helps is a result too.",
        usage="%(prog)s [options] SCRIPT [ARGUMENT ...] | %(prog)s [options] -m MODULE [ARGUMENT ...]",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, metavar="M", help="time limit in minutes (default: 10)")
    add("--out", type=Path, default=Path("runs/tune"), metavar="FOLDER", help="where to write (default: runs/tune)")
    add("--only", type=_names, default=(), metavar="NAME,...", help="settings to try, such as fused,'workers-*'")
    add("-m", dest="module", action="store_true", help="run a module or package, as python -m does")
    add("program", metavar="SCRIPT", help="a Python script that trains with a Trainer, or the name after -m")
    own = add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the script's own arguments")
    own.required = False  # or argparse names it together with a missing SCRIPT
    parser.set_defaults(run=_tune, options=tuple(parser._option_string_actions))


def _tune(arguments: argparse.Namespace) -> int:
    from lightning_turbo.tune.command import run_tune
    from lightning_turbo.tune.runner import TuneSettings

    names = ("program", "module", "minutes", "out", "only")
    given = {name: getattr(arguments, name) for name in names}
    own = _arguments_of_script("tune", arguments.program, arguments)
    return run_tune(TuneSettings(arguments=tuple(own), **given))
