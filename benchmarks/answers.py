"""``python -m benchmarks answers``: does ``tune`` find the known answer of each script in ``examples/tune``?

Each script is written so that it is known which settings help. The table is printed to standard output. The exit status
is 1 if a run does not find a setting that helps, recommends one that does not help, or measures one that it should have
ruled out. ``--runs`` repeats each script.
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
    """The known answer of a script, as patterns of candidates.

    Attributes:
        wanted: At least one of these must be chosen.
        unwanted: None of these may be chosen.
        reasons: Pattern -> part of the reason that ``tune`` must give for these candidates, unless its time was up.
    """

    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def differs(self, results: Mapping[str, Any]) -> str:
        """Return how the results of a run differ from the answer, or an empty string if they agree."""
        chosen, reasons = results["chosen"]["settings"], {each["name"]: each["why"] for each in results["candidates"]}
        if self.wanted and not _matching(chosen, self.wanted):
            return f"expected one of {', '.join(self.wanted)}"
        if wrong := _matching(chosen, self.unwanted):
            return f"{', '.join(wrong)} does not help here"
        for pattern, reason in self.reasons.items():
            for name in _matching(reasons, (pattern,)):
                if reason not in reasons[name] and "the time" not in reasons[name]:
                    return f"{name}: {reasons[name]}; expected: {reason}"
        return ""


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


HAS_BFLOAT16 = bool(computes_in_bfloat16())
ANSWERS = {
    "disk": Answer(("prefetch-threads", "workers-2*"), PRECISION),
    "jpegs": Answer(LOADERS, PRECISION),
    "toy": Answer(("lean",)),
    "volumes": Answer(("bf16-mixed",) if HAS_BFLOAT16 else (), () if HAS_BFLOAT16 else PRECISION),
    "short": Answer(("persistent-workers", "workers-*-persistent")),
    "scans": Answer(LOADERS, () if HAS_BFLOAT16 else PRECISION),
    "double": Answer(("prefetch-threads", "workers-2*"), PRECISION, dict.fromkeys(PRECISION, "weights are float64")),
    "untraceable": Answer(("fused",)),
    "rivals": Answer(("workers-*",), ("prefetch*",), {"prefetch-threads": "no better than workers-"}),
    "nothing": Answer((), ("*",)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the scripts, and return 1 if an answer was not found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks answers", description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="time limit of each run (default: 3)")
    parser.add_argument("--runs", type=int, default=1, help="runs of each script (default: 1)")
    parser.add_argument("--page", type=Path, help="also write the table to this file")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(ANSWERS), default=list(ANSWERS), help="scripts (default: all)"
    )
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(arguments)
    rows, missed, loads = [], 0, []
    for name in (name for name in options.only for _ in range(options.runs)):
        with tempfile.TemporaryDirectory() as folder:
            script = SCRIPTS / f"{name}.py"
            settings = TuneSettings(program=str(script), minutes=options.minutes, out=Path(folder))
            if run_tune(settings, io.StringIO()) != 0:
                break  # stopped by Ctrl-C
            results = json.loads((Path(folder) / "tune.json").read_text())
        differs = ANSWERS[name].differs(results)
        missed += bool(differs)
        loads += [results["other_cores"]] if results["other_cores"] is not None else []
        step = results["step"]  # None if the time was up before it was measured
        took = "" if step is None else f"{1e3 * step['seconds']:.3g}"
        rows.append([f"`{name}.py`", took, results["verdict"], differs or "found"])
        print_lines(" | ".join(rows[-1]))  # now, so that Ctrl-C does not lose it
    facts = describe_machine("cpu")
    lines = [
        "# Known answers that tune found\n",
        f"{len(rows) - missed} of {len(rows)} runs found the known answer of the script (`examples/tune/README.md`).\n",
        f"Command, on {datetime.now(timezone.utc):%Y-%m-%d}: `python -m benchmarks answers {shlex.join(arguments)}`.",
        f"{facts['processor']}, {facts['cores']} cores, torch {facts['versions']['torch']}.",
        f"Other programs used {min(loads):.1f} to {max(loads):.1f} cores meanwhile.\n" if loads else "",
        *markdown_table(["Script", "Step, ms", "Verdict", "Answer"], rows),
    ]
    print_lines("", *lines)
    if options.page is not None:
        options.page.write_text("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
