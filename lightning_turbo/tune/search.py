"""The search: what helps alone, what of it helps together, and whether the whole is confirmed at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, step_seconds
from lightning_turbo.tune.candidates import Candidate, Facts, why_not
from lightning_turbo.tune.evidence import DEFAULT, Case, Comparison, compare_losses

__all__ = ["Runner", "Search", "Trial"]

GROUP = 4  # cases that are alive beside the one that they are compared with
SCREENING = 4  # processes of a candidate that comes through to the end of the screening
ELIMINATION = 4  # processes of each comparison with one setting left out
FINAL = 6  # processes of each side of the last comparison

SEVERITY = ("", "same bits", "rounding", "other maths")

Rows = Mapping[Case, Mapping[str, Any]]


class Runner(Protocol):
    """Measures cases; the real one runs the script, that of the tests has a table of times."""

    cost: float  # seconds of a process from its start to its end, as far as is known

    def set_pace(self, step_seconds: float, accumulate: int) -> None:
        """Choose how many steps make a round."""
        ...

    def measure(self, cases: Sequence[Case]) -> Rows:
        """Measure one fresh process of each case, in turns, and return their rows."""
        ...

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        ...


@dataclass
class Trial:
    """What became of a candidate."""

    candidate: Candidate
    why: str = ""  # it is kept, or not
    alone: Comparison = field(default_factory=Comparison)  # against the script as it is
    beside: Comparison = field(default_factory=Comparison)  # all winners against all winners but this one
    kept: bool = False

    @property
    def case(self) -> Case:
        """It alone."""
        return Case((self.candidate.name,))

    @property
    def undecided(self) -> bool:
        """Whether it was measured in too few processes to say anything, and looked well."""
        return 0 < len(self.alone.logs) < SCREENING and self.alone.ratio < 0.97 and not self.alone.gains

    @property
    def untried(self) -> bool:
        """Whether nothing ruled it out, and it was not measured."""
        return not (self.why or self.alone.logs or self.alone.error)


class Search:
    """Finds the settings under which a script takes less time.

    Args:
        candidates: What is tried.
        runner: Measures.
        same_maths: Whether only what keeps every bit is kept.
    """

    def __init__(self, candidates: Sequence[Candidate], runner: Runner, *, same_maths: bool = False) -> None:
        self.trials = {each.name: Trial(each) for each in candidates}
        self.runner = runner
        self.same_maths = same_maths
        self.facts: Facts | None = None  # before the headroom is measured
        self.chosen = DEFAULT  # what is recommended; the script as it is if nothing helps or nothing is confirmed yet
        self.final = Comparison()  # the chosen case, or the one that was not confirmed, against the script as it is
        self.verdict = ""  # why nothing is recommended
        self.interrupted = False
        self.on_headroom: Callable[[Facts], object] = lambda facts: None
        self._total = runner.left
        self._defaults: list[list[float]] = []  # losses of the script as it is, of each process

    def run(self) -> None:
        """Search until it is done, the budget is spent, or Ctrl-C; the attributes hold what is known.

        Raises:
            TurboError: If the script cannot be measured.
        """
        try:
            self.measure_headroom()
            self.screen()
            self.confirm(self.eliminate(self.winners()))
        except InterruptedRunError:
            self.interrupted = True
            self.verdict = "the search was ended before the last comparison; nothing is recommended"
        for trial in self.trials.values():
            trial.why = trial.why or _reason(trial)

    def measure_headroom(self) -> None:
        """Measure the step as it is, with one batch again and again, and the loader alone."""
        first = self._measure([DEFAULT])[DEFAULT]
        if first["status"] != "ok":
            raise TurboError(f"the script cannot be measured: {first['reason'] or first['status']}")
        facts = dict(first["numbers"]["facts"])
        accumulate = facts.pop("accumulate", 1)
        self.runner.set_pace(_seconds(first), accumulate)
        cases = [DEFAULT, Case(mode="one batch"), Case(mode="loader")]
        rows = self._measure(cases)
        step, one_batch, loader = (1e3 * _seconds(rows[case]) for case in cases)
        self.facts = Facts(step_ms=step, one_batch_ms=one_batch or step, loader_ms=loader, **facts)
        self.on_headroom(self.facts)
        self.runner.set_pace(step / 1e3, accumulate)
        self._rule_out(self.facts)

    def screen(self) -> None:
        """Compare each candidate with the script as it is; the better half goes on, up to four processes."""
        alive = sorted((trial for trial in self.trials.values() if not trial.why), key=self._share, reverse=True)
        for count in range(1, SCREENING + 1):
            queue = list(alive)
            while chunk := queue[: min(self._group, self._affordable(0.3 * self._total) - 1)]:
                self._compare_alone(chunk)
                queue = queue[len(chunk) :]
            alive = _better_half([trial for trial in alive if len(trial.alone.logs) == count])

    def winners(self) -> list[Trial]:
        """Return those that gain alone, the best of each kind, the best first.

        Where the time was too short to decide about any, that is the best one, about which the last comparison decides.
        """
        best: dict[str, Trial] = {}
        for trial in filter(self._keeps_maths, _gaining(_by_ratio(self.trials.values()))):
            if best.setdefault(trial.candidate.kind, trial) is not trial:
                trial.why = "another one of its kind is better"
        return list(best.values())

    def eliminate(self, winners: Sequence[Trial]) -> Case:
        """Put the winners together, and leave each out once, until each that is left makes the rest faster."""
        kept = list(winners)
        while len(kept) > 1:
            whole = self._case(kept)
            for trial in kept:
                trial.beside = Comparison()
            useless = self._leave_out(whole, kept)
            if not useless:
                break
            worst = max(useless, key=lambda trial: (bool(trial.beside.error), trial.beside.ratio, trial.alone.ratio))
            worst.why = worst.beside.error or f"beside {whole.without(worst.candidate.name)} it gains nothing"
            kept.remove(worst)
        return self._case(kept)

    def confirm(self, case: Case) -> None:
        """Compare a case with the script as it is in six processes each, and choose it if it gains."""
        if case == DEFAULT:
            self.verdict = self._nothing()
            return
        for _ in range(FINAL):
            rows = self._measure([DEFAULT, case])
            self.final.add(rows[case], rows[DEFAULT])
        self.verdict = self._objection(case)
        if not self.verdict:
            self.chosen = case
            for name in case.names:
                self.trials[name].kept = True

    def result(self, case: Case, comparison: Comparison) -> str:
        """Return what a case does to the result, by the losses and by the table of candidates.

        - The losses of the script differ from process to process: what the table says.
        - The case has the same losses, and the table says "other maths" of none of its candidates: same bits. Other
          maths, as another order of samples in the next epoch, need not show in the losses.
        - Otherwise: what changes more of what the losses say and what the table says.
        """
        repeatable = all(compare_losses(each, self._defaults[0]) == "same bits" for each in self._defaults)
        measured = compare_losses(*comparison.losses) if repeatable else ""
        declared = [self.trials[name].candidate.result for name in case.names]
        same = measured == "same bits" and "other maths" not in declared
        return measured if same else max([measured, *declared], key=SEVERITY.index)

    def _nothing(self) -> str:
        late = sum(trial.untried for trial in self.trials.values())
        short = f"nothing is recommended: no time was left to try {late} of {len(self.trials)} settings"
        return short if late else "nothing helps here"

    def _objection(self, case: Case) -> str:
        """Why a case is not recommended after the last comparison."""
        if len(self.final.logs) < FINAL:
            return f"nothing is recommended: {case} failed in the last comparison: {self.final.error}"
        if not self.final.gains:
            return f"nothing helps here: the last comparison did not confirm {case}"
        if self.same_maths and self.result(case, self.final) != "same bits":
            return f"nothing is recommended: {case} changes the losses"
        return ""

    def _rule_out(self, facts: Facts) -> None:
        for trial in self.trials.values():
            reason = why_not(trial.candidate, facts)
            trial.why = f"not tried: {reason}" if reason else ""

    @property
    def _group(self) -> int:
        """How many are alive beside what they are compared with; all have to fit into the memory of a GPU."""
        return 1 if self.facts is not None and self.facts.device == "cuda" else GROUP

    def _share(self, trial: Trial) -> float:
        """The share of a step that a candidate can make shorter: the largest is tried first."""
        waiting = 0.0 if self.facts is None else self.facts.waiting
        return waiting if trial.candidate.slot == "loading" else 1.0 - waiting

    def _compare_alone(self, trials: Sequence[Trial]) -> None:
        rows = self._measure([DEFAULT, *(trial.case for trial in trials)])
        for trial in trials:
            trial.alone.add(rows[trial.case], rows[DEFAULT])

    def _compare_without(self, whole: Case, trials: Sequence[Trial]) -> None:
        rows = self._measure([whole, *(whole.without(trial.candidate.name) for trial in trials)])
        for trial in trials:
            trial.beside.add(rows[whole], rows[whole.without(trial.candidate.name)])

    def _keeps_maths(self, trial: Trial) -> bool:
        if self.same_maths and self.result(trial.case, trial.alone) != "same bits":
            trial.why = "it changes the losses"
            return False
        return True

    def _case(self, trials: Sequence[Trial]) -> Case:
        names = {trial.candidate.name for trial in trials}
        return Case(tuple(name for name in self.trials if name in names))

    def _leave_out(self, whole: Case, kept: Sequence[Trial]) -> list[Trial]:
        """Compare a case with itself without each of its candidates, and return those that gain nothing in it."""
        for _ in range(ELIMINATION):
            for start in range(0, len(kept), self._group):
                chunk = kept[start : start + self._group]
                if self._affordable() <= len(chunk):
                    return []  # the last comparison is of the whole, then
                self._compare_without(whole, chunk)
        return [trial for trial in kept if not trial.beside.gains]

    def _affordable(self, reserve: float = 0.0) -> int:
        """How many processes there is time for, beside a reserve and what the last comparison takes."""
        # A fifth more than processes have taken so far; but on a slow machine something has to be tried, too.
        last = min(2.4 * FINAL * self.runner.cost, 0.5 * self._total)
        return max(1, int((self.runner.left - max(last, reserve)) / self.runner.cost))

    def _measure(self, cases: Sequence[Case]) -> Rows:
        rows = self.runner.measure(cases)
        if losses := rows.get(DEFAULT, {}).get("numbers", {}).get("losses"):
            self._defaults.append(losses)
        return rows


def _gaining(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.alone.gains] or [trial for trial in trials if trial.undecided][:1]


def _by_ratio(trials: Iterable[Trial]) -> list[Trial]:
    return sorted((trial for trial in trials if trial.alone.logs), key=lambda trial: trial.alone.ratio)


def _better_half(trials: Sequence[Trial]) -> list[Trial]:
    """The better half, or four if that is more, without those that lose."""
    half = _by_ratio(trials)[: max(GROUP, math.ceil(len(trials) / 2))]
    return [trial for trial in half if trial.alone.ratio < 1.01]


def _seconds(row: Mapping[str, Any]) -> float:
    """The median seconds of a step; 0 where nothing was measured."""
    summary = step_seconds(row)
    return 0.0 if summary is None else summary.median


def _reason(trial: Trial) -> str:
    """What is said of a candidate about which nothing else is known."""
    if trial.kept:
        return "kept"
    if trial.untried:
        return "not tried: no time was left"
    if trial.alone.error:
        return f"failed: {trial.alone.error}"
    if trial.undecided:
        return "not decided: no time was left for further processes"
    return "not confirmed" if trial.alone.gains else "no gain"
