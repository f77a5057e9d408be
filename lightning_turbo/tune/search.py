"""The search: what helps alone, what of it helps together, and whether the whole is confirmed at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, interval_of, log_quotients, step_seconds
from lightning_turbo.tune.candidates import Candidate, Facts

__all__ = ["Case", "Comparison", "Runner", "Search", "Trial", "compare_losses"]

GROUP = 4  # cases that are alive beside the one that they are compared with
SCREENING = 4  # processes of a candidate that comes through to the end of the screening
ELIMINATION = 4  # processes of each comparison with one setting left out
FINAL = 6  # processes of each side of the last comparison
NO_TIME = "no time was left"


@dataclass(frozen=True)
class Case:
    """What a process measures.

    Args:
        names: Of candidates, in the order of the table; none is the script as it is.
        mode: ``"step"``, ``"one batch"`` or ``"loader"``, see ``probe.Probe``.
    """

    names: tuple[str, ...] = ()
    mode: str = "step"

    def __str__(self) -> str:
        if self.mode != "step":
            return self.mode
        return " + ".join(self.names) or "default"

    def without(self, name: str) -> Case:
        """Return this case without one of its candidates."""
        return Case(tuple(each for each in self.names if each != name))


DEFAULT = Case()


class Runner(Protocol):
    """Measures cases; the real one runs the script, that of the tests has a table of times."""

    cost: float
    """Seconds that a process has taken from its start to its end, as far as is known."""

    def set_pace(self, step_seconds: float, accumulate: int) -> None:
        """Choose how many steps make a round."""
        ...

    def measure(self, cases: Sequence[Case]) -> dict[Case, dict[str, Any]]:
        """Measure one fresh process of each case, in turns, and return their rows."""
        ...

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        ...


@dataclass
class Comparison:
    """One case against another, process by process.

    Args:
        logs: Logarithm of the ratio of their times in each pair of processes.
        error: Why it failed.
        losses: Of the first steps, above and below the line.
    """

    logs: list[float] = field(default_factory=list)
    error: str = ""
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def ratio(self) -> float:
        """The time of the one divided by that of the other; infinite before anything is measured."""
        return math.exp(statistics.fmean(self.logs)) if self.logs else math.inf

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio, from two pairs of processes on."""
        return interval_of(self.logs, fewest=2)

    @property
    def gains(self) -> bool:
        """Whether the upper end of the interval is below 1."""
        return self.interval is not None and self.interval[1] < 1.0

    def add(self, above: Mapping[str, Any], below: Mapping[str, Any]) -> None:
        """Add a pair of processes."""
        if above["status"] != "ok":
            self.error = above["reason"] or above["status"]
            return
        self.logs += log_quotients(above, below)
        self.losses = above["numbers"].get("losses", []), below["numbers"].get("losses", [])


@dataclass
class Trial:
    """What became of a candidate.

    Args:
        candidate: Of the table.
        why: Why it is kept, or is not.
        alone: It alone against the script as it is.
        beside: All winners against all winners but this one.
        kept: Whether it is among the chosen.
    """

    candidate: Candidate
    why: str = ""
    alone: Comparison = field(default_factory=Comparison)
    beside: Comparison = field(default_factory=Comparison)
    kept: bool = False


def compare_losses(losses: Sequence[float | None], other: Sequence[float | None]) -> str:
    """Return what the losses of the first steps say of two runs with the same seed.

    Args:
        losses: Of the one.
        other: Of the other.

    Returns:
        ``"same bits"``, ``"rounding"`` (the first three agree to 1e-4), ``"other maths"``, or an empty text where there
        is nothing to compare.
    """
    pairs = list(zip(losses, other, strict=False))
    if not pairs:
        return ""
    if all(one == two for one, two in pairs):
        return "same bits"
    early = [(one, two) for one, two in pairs[:3] if one is not None and two is not None]
    near = all(math.isclose(one, two, rel_tol=1e-4, abs_tol=1e-6) for one, two in early)
    return "rounding" if early and near else "other maths"


class Search:
    """Finds the settings under which a script takes less time.

    Args:
        candidates: What is tried.
        runner: Measures.
        same_maths: Whether only what keeps every bit is kept.

    Attributes:
        facts: What is known of script and machine; ``None`` before the headroom is measured.
        trials: What became of each candidate.
        chosen: The case that is recommended; the script as it is if nothing helps, or if nothing is confirmed yet.
        final: The chosen case, or the one that was not confirmed, against the script as it is.
        verdict: Why nothing is recommended.
        interrupted: Whether the search was ended early.
        on_headroom: Called with the facts as soon as they are known.
    """

    def __init__(self, candidates: Sequence[Candidate], runner: Runner, *, same_maths: bool = False) -> None:
        self.trials = {each.name: Trial(each) for each in candidates}
        self.runner = runner
        self.same_maths = same_maths
        self.facts: Facts | None = None
        self.chosen = DEFAULT
        self.final = Comparison()
        self.verdict = ""
        self.interrupted = False
        self.total = runner.left
        self.on_headroom: Callable[[Facts], object] = lambda facts: None
        self._defaults: list[list[float]] = []  # losses of the script as it is, of each process

    def run(self) -> None:
        """Search until it is done, the budget is spent, or Ctrl-C; the attributes hold what is known."""
        try:
            self.measure_headroom()
            winners = self.screen()
            self.confirm(self.eliminate(winners))
        except InterruptedRunError:
            self.interrupted = True
            self.verdict = self.verdict or "the search was ended before the last comparison; nothing is recommended"
        for trial in self.trials.values():
            trial.why = trial.why or self._reason(trial)

    def measure_headroom(self) -> None:
        """Measure the step as it is, with one batch again and again, and the loader alone.

        Raises:
            TurboError: If the script cannot be measured.
        """
        first = self._measure([DEFAULT])[DEFAULT]
        if first["status"] != "ok":
            raise TurboError(f"the script cannot be measured: {first['reason'] or first['status']}")
        facts = dict(first["numbers"]["facts"])
        accumulate = facts.pop("accumulate", 1)
        self.runner.set_pace(_middle(first), accumulate)
        cases = [DEFAULT, Case(mode="one batch"), Case(mode="loader")]
        rows = self._measure(cases)
        step, one_batch, loader = (1e3 * _middle(rows[case]) for case in cases)
        self.facts = Facts(step_ms=step, one_batch_ms=one_batch if one_batch > 0 else step, loader_ms=loader, **facts)
        self.on_headroom(self.facts)
        self.runner.set_pace(step / 1e3, accumulate)
        for trial in self.trials.values():
            trial.why = trial.candidate.why_not(self.facts)
            trial.why = f"not tried: {trial.why}" if trial.why else ""

    def screen(self) -> list[Trial]:
        """Compare each candidate with the script as it is; the better half goes on, up to four processes.

        Returns:
            Those that gain, the best of each slot, the best first.
        """
        alive = [trial for trial in self.trials.values() if not trial.why]
        for count in range(1, SCREENING + 1):
            for start in range(0, len(alive), GROUP):
                chunk = alive[start : start + GROUP]
                if not self._has_time(len(chunk) + 1, 0.3 * self.total):
                    break
                rows = self._measure([DEFAULT, *(Case((trial.candidate.name,)) for trial in chunk)])
                for trial in chunk:
                    trial.alone.add(rows[Case((trial.candidate.name,))], rows[DEFAULT])
            alive = sorted((trial for trial in alive if len(trial.alone.logs) == count), key=lambda t: t.alone.ratio)
            promising = [trial for trial in alive if trial.alone.ratio < 1.01]
            alive = promising[: max(GROUP, math.ceil(len(alive) / 2))]
        gaining = [trial for trial in self.trials.values() if trial.alone.gains and self._allowed(trial)]
        gaining.sort(key=lambda trial: trial.alone.ratio)
        slots = {trial.candidate.slot: trial for trial in reversed(gaining)}  # the best of a slot comes last, and stays
        return [trial for trial in gaining if slots[trial.candidate.slot] is trial]

    def eliminate(self, winners: Sequence[Trial]) -> Case:
        """Put the winners together, and leave each out once, until each that is left makes the rest faster.

        Args:
            winners: The best first.

        Returns:
            The case that is left.
        """
        kept = list(winners)
        while len(kept) > 1:
            whole = self._case(kept)
            for trial in kept:
                trial.beside = Comparison()
            if not self._leave_out(whole, kept):
                break
            useless = [trial for trial in kept if not trial.beside.gains]
            if not useless:
                break
            worst = max(useless, key=lambda trial: (bool(trial.beside.error), trial.beside.ratio, trial.alone.ratio))
            worst.why = worst.beside.error or f"beside {whole.without(worst.candidate.name)} it gains nothing"
            kept.remove(worst)
        return self._case(kept)

    def confirm(self, case: Case) -> None:
        """Compare a case with the script as it is in six processes each, and choose it if it gains.

        Args:
            case: What is left of the winners.
        """
        if case == DEFAULT:
            late = [t for t in self.trials.values() if not t.why and not t.alone.logs and not t.alone.error]
            short = f"nothing is recommended: no time was left to try {len(late)} of {len(self.trials)} settings"
            self.verdict = short if late else "nothing helps here"
            return
        for _ in range(FINAL):
            rows = self._measure([DEFAULT, case])
            self.final.add(rows[case], rows[DEFAULT])
        if len(self.final.logs) < FINAL:
            self.verdict = f"nothing is recommended: {case} failed in the last comparison: {self.final.error}"
        elif not self.final.gains:
            self.verdict = f"nothing helps here: the last comparison did not confirm {case}"
        elif self.same_maths and self.result(self.final) not in ("same bits", ""):
            self.verdict = f"nothing is recommended: {case} changes the losses"
        else:
            self.chosen = case
            for name in case.names:
                self.trials[name].kept = True

    def result(self, comparison: Comparison, candidate: Candidate | None = None) -> str:
        """Return what a comparison says of the result, or what the table says where losses differ from run to run."""
        found = compare_losses(*comparison.losses) if self.repeatable else ""
        return found or (candidate.result if candidate is not None else "")

    @property
    def repeatable(self) -> bool:
        """Whether the script as it is gave the same losses in each process."""
        return all(compare_losses(each, self._defaults[0]) == "same bits" for each in self._defaults)

    def _allowed(self, trial: Trial) -> bool:
        if self.same_maths and self.result(trial.alone, trial.candidate) != "same bits":
            trial.why = "it changes the losses"
            return False
        return True

    def _case(self, trials: Sequence[Trial]) -> Case:
        names = {trial.candidate.name for trial in trials}
        return Case(tuple(name for name in self.trials if name in names))

    def _leave_out(self, whole: Case, kept: Sequence[Trial]) -> bool:
        """Measure a case against itself without each of its candidates; tell whether there was time for it."""
        for _ in range(ELIMINATION):
            for start in range(0, len(kept), GROUP):
                chunk = kept[start : start + GROUP]
                if not self._has_time(len(chunk) + 1):
                    return all(len(trial.beside.logs) > 1 for trial in kept)
                rows = self._measure([whole, *(whole.without(trial.candidate.name) for trial in chunk)])
                for trial in chunk:
                    trial.beside.add(rows[whole], rows[whole.without(trial.candidate.name)])
        return True

    def _has_time(self, processes: int, reserve: float = 0.0) -> bool:
        """Whether there is time for so many processes, with what the last comparison takes and a reserve."""
        last = 2.4 * FINAL * self.runner.cost  # a fifth more than it has taken so far
        return self.runner.left - processes * self.runner.cost >= max(last, reserve)

    def _measure(self, cases: Sequence[Case]) -> dict[Case, dict[str, Any]]:
        rows = self.runner.measure(cases)
        losses = rows.get(DEFAULT, {}).get("numbers", {}).get("losses")
        if losses:
            self._defaults.append(losses)
        return rows

    def _reason(self, trial: Trial) -> str:
        if trial.kept:
            return "kept"
        if trial.alone.error:
            return f"failed: {trial.alone.error}"
        if not trial.alone.logs:
            return f"not tried: {NO_TIME}"
        if trial.alone.gains:
            return "another one of its kind is better" if not trial.beside.logs else "not confirmed"
        return "no gain"


def _middle(row: Mapping[str, Any]) -> float:
    """The median seconds of a step; 0 where nothing was measured."""
    summary = step_seconds(row)
    return 0.0 if summary is None else summary.median
