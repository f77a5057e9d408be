"""The search: the best candidate of each kind, what of these helps together, and the promise about the result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, computes_in_bfloat16
from lightning_turbo.tune.candidates import SMALL_SHARE, Candidate, Look, saving, why_not
from lightning_turbo.tune.promise import ACCEPTED, Promise, Stretch, describe_epoch, plan, ratio_of, screening

__all__ = ["Names", "Runner", "Search", "Trial"]

GROUP = 4  # candidates alive at once, besides the script as it is
PASSES = 3  # processes of a candidate at most, in the screening
ALMOST = 1.03  # of two settings that differ less, the plainer one is chosen
LATE = "the time was over"

Names: TypeAlias = tuple[str, ...]
"""Candidates that are measured together, in the order of the table; none is the script as it is."""
Row: TypeAlias = Mapping[str, Any]


class Runner(Protocol):
    """Measures settings; the real one runs the script, and the one in tests has a table of times."""

    start: float  # seconds until a process trains

    def look(self) -> Row:
        """Return the row of a process that looks at the script as it is."""
        ...

    def measure(self, together: Sequence[Names], stretch: Stretch) -> Mapping[Names, Row]:
        """Measure a fresh process of each, turn by turn, and return their rows."""
        ...

    @property
    def left(self) -> float:
        """Remaining seconds of the budget."""
        ...


@dataclass
class Trial:
    """The outcome of a candidate."""

    candidate: Candidate
    why: str = ""  # how it ended; empty as long as it may be chosen
    saving: float = 0.0  # usual share of a step; the largest is tried first
    logs: list[float] = field(default_factory=list)  # log ratio to the script as it is, in each process

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return self.candidate.name

    @property
    def ratio(self) -> float:
        """The time of a step divided by that of the script as it is; infinite before anything was measured."""
        return math.exp(statistics.fmean(self.logs)) if self.logs else math.inf


class Search:
    """Finds the settings under which a script takes less time, and promises what they bring.

    ``run_tune`` creates it and calls ``run``, which ends when the promise is measured, when the time is over, or after
    Ctrl-C. Half of the time is for the promise, if it needs as much. The attributes hold what was found so far, and
    ``chosen`` is always what a promise was kept for.

    Args:
        candidates: The candidates to try.
        runner: Measures settings.
        say: Called with what a user can know at the start.
    """

    def __init__(
        self, candidates: Sequence[Candidate], runner: Runner, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self.trials = {each.name: Trial(each) for each in candidates}
        self.runner = runner
        self.look: Look | None = None  # None until the script was looked at
        self.promise = Promise()
        self.chosen: Names = ()
        self.interrupted = False
        self._say = say
        self.total = runner.left  # seconds of the budget

    def run(self) -> None:
        """Search until everything is done, the budget is spent, or Ctrl-C.

        Raises:
            TurboError: If the script cannot be measured.
        """
        try:
            self.look = self._look_at_script()
            self._exclude(self.look)
            self._screen(screening(self.look))
            self._confirm(self._together(self._winners(), screening(self.look)), self.look)
        except InterruptedRunError:
            self.interrupted = True
        if self.promise.is_kept:
            self.chosen = tuple(self.promise.names)
        for trial in self.trials.values():
            trial.why = trial.why or self._end_of(trial)

    @property
    def ahead(self) -> Stretch:
        """What the promise is going to be of, by what the look has shown."""
        assert self.look is not None
        return self._plan(self.look, self.total / 2)

    @property
    def untried(self) -> list[str]:
        """Names of candidates that were left out for lack of time."""
        return [each.name for each in self.trials.values() if each.why == f"not tried because {LATE}"]

    @property
    def why_ended(self) -> str:
        """Why something was not measured."""
        return "the search was ended" if self.interrupted and self.runner.left > 0 else LATE

    def _look_at_script(self) -> Look:
        row = self.runner.look()
        if row["status"] != "ok":
            raise TurboError(f"the script cannot be measured: {row['reason'] or row['status']}")
        look = Look(**row["numbers"])
        self._say(describe_epoch(look, self._plan(look, self.total / 2), self.total / 60, self.runner.start))
        return look

    def _plan(self, look: Look, seconds: float) -> Stretch:
        return plan(look, seconds, self.runner.start)

    def _exclude(self, look: Look) -> None:
        """Exclude what the look says cannot help, and estimate what the others save."""
        computes_in_half = computes_in_bfloat16() is not False or look.device == "cuda"
        for trial in self.trials.values():
            reason = why_not(trial.candidate, look)
            trial.why = f"not tried because {reason}" if reason else ""
            trial.saving = saving(trial.candidate, look, computes_in_half)

    def _screen(self, stretch: Stretch) -> None:
        """Compare candidates with the script as it is: each once, then again those that may be the best of a kind."""
        able = sorted((each for each in self.trials.values() if not each.why), key=lambda each: -each.saving)
        for turn in range(PASSES):
            for group in self._groups(able if turn == 0 else _rivals(able)):
                rows = self._measure([(), *((each.name,) for each in group)], stretch)
                for trial in group:
                    self._note(trial, rows[(trial.name,)], rows[()])

    def _groups(self, trials: Sequence[Trial]) -> Iterator[list[Trial]]:
        """Divide candidates into groups for which there is time besides the promise; the first always gets some."""
        # All processes of a group must fit into the memory of a GPU.
        size = 1 if self.look is not None and self.look.device == "cuda" else GROUP
        todo = list(trials)
        while todo:
            number = min(size, self._affordable() - 1)
            if not any(trial.logs for trial in self.trials.values()):
                number = max(1, number)
            if number < 1:
                return
            yield todo[:number]
            todo = todo[number:]

    def _affordable(self) -> int:
        """Return how many processes of a screening there is time for, besides the promise."""
        assert self.look is not None
        ahead = self.ahead
        promise = 2 * ahead.pairs * (self.runner.start + ahead.steps * self.look.pace)
        each = self.runner.start + screening(self.look).steps * self.look.pace
        return int((self.runner.left - min(promise, self.total / 2)) / each)

    def _measure(self, together: Sequence[Names], stretch: Stretch) -> Mapping[Names, Row]:
        rows = self.runner.measure(together, stretch)
        if rows.get((), {"status": "ok"})["status"] != "ok":
            reason = rows[()]["reason"] or rows[()]["status"]
            raise TurboError(f"the script as it is could be measured once, but not again: {reason}")
        return rows

    def _note(self, trial: Trial, row: Row, default: Row) -> None:
        """Note what a process has shown about a candidate alone."""
        log = ratio_of(row, default)
        if row["status"] != "ok" or log is None:
            trial.why = _failure(row)
        else:
            trial.logs.append(log)

    def _winners(self) -> list[Trial]:
        """Return the best candidate of each kind, if it gains, and mark the others of its kind as no better."""
        able = [each for each in self.trials.values() if each.logs and not each.why]
        kinds = dict.fromkeys(each.candidate.kind for each in able)
        winners = [_best([each for each in able if each.candidate.kind == kind]) for kind in kinds]
        return [each for each in winners if each is not None]

    def _together(self, winners: Sequence[Trial], stretch: Stretch) -> Names:
        """Leave each of the winners out once, until each of the rest contributes."""
        kept = list(winners)
        while len(kept) > 1 and self._affordable() > len(kept):
            ratios = self._leave_out(kept, stretch)
            worst = max(kept, key=lambda trial: ratios.get(trial.name, -math.inf))
            if ratios.get(worst.name, -math.inf) < -SMALL_SHARE:
                break
            kept.remove(worst)
            worst.why = f"adds less than {SMALL_SHARE:.0%} to {' + '.join(each.name for each in kept)}"
        return self._names(kept)

    def _leave_out(self, kept: Sequence[Trial], stretch: Stretch) -> dict[str, float]:
        """Return the log ratio of all winners to all without one; large if they run without it alone."""
        whole = self._names(kept)
        without = {each.name: tuple(name for name in whole if name != each.name) for each in kept}
        ratios: dict[str, float] = {}
        for group in self._groups(kept):
            rows = self._measure([whole, *(without[each.name] for each in group)], stretch)
            for trial in group:
                above, below = rows[whole], rows[without[trial.name]]
                if below["status"] == "ok" and above["status"] != "ok":
                    ratios[trial.name] = math.inf
                elif (log := ratio_of(above, below)) is not None:
                    ratios[trial.name] = log
        return ratios

    def _names(self, trials: Sequence[Trial]) -> Names:
        return tuple(name for name, trial in self.trials.items() if trial in trials)

    def _confirm(self, names: Names, look: Look) -> None:
        """Measure the promise: pairs of processes, with the settings and as the script is."""
        if not names:
            return
        stretch = self._plan(look, self.runner.left)
        self.promise = Promise(names=names, stretch=stretch)
        for number in range(stretch.pairs):
            # The order A B B A cancels a steady drift of the machine.
            order = [(), names] if number % 2 == 0 else [names, ()]
            rows = self._measure(order, stretch)
            log = ratio_of(rows[names], rows[()])
            if rows[names]["status"] != "ok" or log is None:
                self.promise.error = _failure(rows[names])
                return
            self.promise.logs.append(log)
            without = sum(part["seconds"] for part in rows[()]["rounds"])
            self.promise.seconds.append((without, without * math.exp(log)))

    def _end_of(self, trial: Trial) -> str:
        """Return how a candidate ended about which nothing else is known."""
        if trial.name in self.promise.names:
            said = str(self.promise).partition(":")[0]
            end = said if len(self.promise.logs) >= ACCEPTED else f"not confirmed because {self.why_ended}"
            return self.promise.error or ("kept" if self.chosen else end)
        if not trial.logs:
            return f"not tried because {self.why_ended}"
        return "no gain" if trial.ratio >= 1.0 - SMALL_SHARE else "gained in a first comparison, and was not confirmed"


def _best(trials: Sequence[Trial]) -> Trial | None:
    """Return the first of a kind, in the order of the table, that is almost as fast as the best; None if none gains."""
    best = min(each.ratio for each in trials)
    if best >= 1.0 - SMALL_SHARE:
        return None
    chosen = next(each for each in trials if each.ratio <= ALMOST * best)
    for trial in trials:
        trial.why = "" if trial is chosen else f"no better than {chosen.name}"
    return chosen


def _failure(row: Row) -> str:
    """Return why a process has no result."""
    reason = (row["reason"] or row["status"]).rstrip(".")
    return f"{'not tried because' if row['status'] == 'skipped' else 'failed:'} {reason}"


def _rivals(trials: Sequence[Trial]) -> list[Trial]:
    """Return those that gained and may be the best of their kind, best first."""
    gaining = sorted((each for each in trials if not each.why and each.ratio < 1.0), key=lambda each: each.ratio)
    best: dict[str, float] = {}
    for trial in gaining:
        best.setdefault(trial.candidate.kind, trial.ratio)
    return [each for each in gaining if each.ratio <= 1.1 * best[each.candidate.kind]]
