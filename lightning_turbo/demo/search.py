"""The search of the demo: what makes a script faster, from short runs in this process."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_turbo.measure import Channel, Interrupt, Meter, count_cores, new_row, serve
from lightning_turbo.tune.candidates import Candidate, combine, list_candidates, select
from lightning_turbo.tune.evidence import Case
from lightning_turbo.tune.report import describe_headroom, make_results, write_results
from lightning_turbo.tune.search import Search
from lightning_turbo.tune.worker import run_program

__all__ = ["tune_script"]

# They need a process of their own or long runs; and each epoch of the demo is a run, where no worker stays.
WITHOUT = ("huge-pages", "threads-*", "compile*", "next-epoch", "*-persistent")
WARMUP = 3
ROUNDS = [{"order": "round", "lead": 1, "steps": 4}] * 2


class ScriptInProcess:
    """Measures cases of a script for ``Search``, one after another in this process, which takes a second a case.

    Args:
        program: The script, and its arguments.
        candidates: By name.
        seed: Seeds weights and order.
        interrupt: Holds the budget.
    """

    def __init__(
        self, program: Sequence[str], candidates: Mapping[str, Candidate], seed: int, interrupt: Interrupt
    ) -> None:
        self.program = program
        self.candidates = candidates
        self.seed = seed
        self.interrupt = interrupt
        self.cost = 1.0

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.interrupt.left

    def set_pace(self, step_seconds: float, accumulate: int) -> None:
        """Keep the rounds as they are."""

    def measure(self, cases: Sequence[Case]) -> dict[Case, dict[str, Any]]:
        """Measure each case once."""
        before = self.left
        rows = {case: self._measure(case) for case in cases}
        self.cost = (before - self.left) / len(cases)
        return rows

    def _measure(self, case: Case) -> dict[str, Any]:
        self.interrupt.check()
        torch.manual_seed(self.seed)
        orders, events = [*ROUNDS, {"order": "end"}], io.StringIO()
        channel = Channel(io.StringIO("".join(f"{json.dumps(order)}\n" for order in orders)), events)
        meter = Meter(channel.ask, warmup=WARMUP)
        settings = dataclasses.asdict(combine(self.candidates[name] for name in case.names))
        program, *arguments = self.program
        task = {"program": program, "module": False, "arguments": arguments, "mode": case.mode, "settings": settings}
        serve(channel, meter, lambda: run_program(task, meter))
        *rounds, last = map(json.loads, events.getvalue().splitlines())
        row = new_row()
        row["rounds"] = [{"sweep": n, **each} for n, each in enumerate(rounds) if each["event"] == "round"]
        ended = {"status": "ok", "numbers": last.get("numbers")}
        return row | (ended if last["event"] == "done" else {"status": last["event"], "reason": last["reason"]})


def tune_script(
    program: Sequence[str], out: Path, *, seed: int, seconds: float, say: Callable[[str], object]
) -> dict[str, Any]:
    """Search as ``lightning-turbo tune`` does, and write its files.

    Args:
        program: The script, and its arguments.
        out: Folder of ``tune.json``, ``turbo.py`` and the others.
        seed: Seeds weights and order.
        seconds: Budget.
        say: Is told how long a step waits for data.

    Returns:
        The content of ``tune.json``.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once a case is over.
    """
    out.mkdir(parents=True, exist_ok=True)
    candidates = select(list_candidates(count_cores()), without=WITHOUT)
    interrupt = Interrupt(seconds)
    with interrupt.caught():
        runner = ScriptInProcess(program, {each.name: each for each in candidates}, seed, interrupt)
        search = Search(candidates, runner)
        search.on_headroom = lambda facts: say(describe_headroom(facts))
        search.run()
    if interrupt.pressed:
        raise KeyboardInterrupt
    results = make_results(search, [Path(sys.executable).name, *program])
    write_results(search, results, out)
    say(f"{shlex.join(results['command'])}: {' + '.join(search.chosen.names) or search.verdict}")
    return results
