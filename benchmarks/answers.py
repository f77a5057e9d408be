"""``python -m benchmarks answers``: tune the scripts of ``examples/tune``, and say which answers were found.

Each script was made so that its answer is known. The table goes to standard output; the exit status is 1 if a run does
not find what helps, recommends what does not, or tries what it should not. ``--runs`` repeats it.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lightning_turbo.measure import computes_in_bfloat16, describe_machine, markdown_table, print_lines
from lightning_turbo.tune.command import run_tune
from lightning_turbo.tune.runner import TuneSettings

SCRIPTS = Path(__file__).parents[1] / "examples" / "tune"
LOADERS = ("prefetch*", "workers-*")
PRECISION = ("bf16-mixed", "O1", "O2")


@dataclass(frozen=True)
class Answer:
    """What is known of a script, as patterns of candidates: one of ``wanted`` is chosen, none of ``unwanted``."""

    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    ends: Mapping[str, str] = field(default_factory=dict)  # pattern -> part of how it ends, unless the time was over

    def differs(self, results: Mapping[str, Any]) -> str:
        """Return how the results of a run differ from it; an empty text if they do not."""
        chosen, ends = results["chosen"]["settings"], {each["name"]: each["why"] for each in results["candidates"]}
        if self.wanted and not _matching(chosen, self.wanted):
            return f"expected one of {', '.join(self.wanted)}"
        if wrong := _matching(chosen, self.unwanted):
            return f"{', '.join(wrong)} does not help here"
        for pattern, end in self.ends.items():
            for name in _matching(ends, (pattern,)):
                if end not in ends[name] and "the time" not in ends[name]:
                    return f"{name}: {ends[name]}; expected: {end}"
        return ""


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


HALF_PAYS = bool(computes_in_bfloat16())
ANSWERS = {
    "disk": Answer(("prefetch-threads", "workers-2*"), PRECISION),
    "jpegs": Answer(LOADERS, PRECISION),
    "toy": Answer(("lean",)),
    "volumes": Answer((*(PRECISION if HALF_PAYS else ()), "compile", "channels-last"), () if HALF_PAYS else PRECISION),
    "biased": Answer(("no-bias",)),
    "scans": Answer(LOADERS, () if HALF_PAYS else PRECISION),
    "double": Answer(("prefetch-threads", "workers-2*"), PRECISION, dict.fromkeys(PRECISION, "weights are float64")),
    "untraceable": Answer(("fused",), ("no-bias",), {"no-bias": "cannot trace this network"}),
    "rivals": Answer(("workers-*",), ("prefetch*",), {"prefetch-threads": "no better than workers-"}),
    "nothing": Answer((), ("*",)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, tune, and return 1 where an answer was not found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks answers", description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of each run (default: 2)")
    parser.add_argument("--runs", type=int, default=1, help="of each script (default: 1)")
    parser.add_argument("--page", type=Path, help="write the table to this file, too")
    parser.add_argument("--only", nargs="+", choices=sorted(ANSWERS), default=list(ANSWERS), help="scripts")
    words = sys.argv[1:] if arguments is None else list(arguments)
    asked = parser.parse_args(words)
    rows, missed = [], 0
    for name in (name for name in asked.only for _ in range(asked.runs)):
        with tempfile.TemporaryDirectory() as folder:
            script = SCRIPTS / f"{name}.py"
            settings = TuneSettings(program=str(script), minutes=asked.minutes, out=Path(folder))
            if run_tune(settings, io.StringIO()) != 0:
                break  # by Ctrl-C
            results = json.loads((Path(folder) / "tune.json").read_text())
        differs = ANSWERS[name].differs(results)
        missed += bool(differs)
        step = results["default"]["step_ms"]  # not known where the time was over before
        rows.append([f"`{name}.py`", "" if step is None else f"{step:.3g}", results["verdict"], differs or "found"])
        print_lines(" | ".join(rows[-1]))  # what is known is not lost
    facts = describe_machine("cpu")
    lines = [
        "# Answers that tune found\n",
        f"{len(rows) - missed} of {len(rows)} runs found what is known of their script (`examples/tune/README.md`).\n",
        f"Command, on {datetime.now(timezone.utc):%Y-%m-%d}: `python -m benchmarks answers {shlex.join(words)}`.",
        f"{facts['processor']}, {facts['cores']} cores, torch {facts['versions']['torch']}.\n",
        *markdown_table(["Script", "Step, ms", "Verdict", "Answer"], rows),
    ]
    print_lines("", *lines)
    if asked.page is not None:
        asked.page.write_text("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
