"""The search: what helps alone, what of it helps together, and whether the result is confirmed at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, computes_in_bfloat16, interval_of, seconds_by_sweep
from lightning_turbo.tune.candidates import SMALL_SHARE, Baseline, Candidate, usual_saving, why_not
from lightning_turbo.tune.evidence import DEFAULT, Comparison, Configuration, compare_losses, epoch_parts

__all__ = ["Runner", "Search", "Trial"]

GROUP = 4  # configurations alive at once, besides the one they are compared with
ELIMINATION = 4  # processes per comparison with one setting left out
FINAL = 10  # processes on each side of the final comparison
FEWEST = 4  # the same if time is short

LATE = "the time that was left was needed to confirm a gain"
OVER = "the time was over"
ENDED = "the search was ended"
SEVERITY = ("", "same bits", "rounding", "other maths")

Rows = Mapping[Configuration, Mapping[str, Any]]


class Runner(Protocol):
    """Measures configurations; the real one runs the script, and the one in tests has a table of times."""

    cost: float  # estimated seconds of a process from start to end

    def set_pace(self, step_seconds: float, accumulate: int) -> None:
        """Choose the number of steps in a round."""
        ...

    def measure(self, configurations: Sequence[Configuration]) -> Rows:
        """Measure a fresh process of each configuration, round by round, and return their rows."""
        ...

    @property
    def left(self) -> float:
        """Remaining seconds of the budget."""
        ...


@dataclass
class Trial:
    """The outcome of a candidate."""

    candidate: Candidate
    saving: float = 0.0  # usual milliseconds per step, from what is known about the step; the largest is tried first
    why: str = ""  # outcome: kept; no gain; undecided; no better than an alternative; failed; not tried
    alone: Comparison = field(default_factory=Comparison)  # compared with the unchanged script
    beside: Comparison = field(default_factory=Comparison)  # all winners compared with all winners except this one
    cures: bool = False  # whether the winners run without this one, so that it may cause their failure
    kept: bool = False

    @property
    def is_untried(self) -> bool:
        """Whether no process has measured it for lack of time alone."""
        late = ("", *(f"not tried because {each}" for each in (LATE, OVER, ENDED)))
        return not (self.alone.error or self.alone.logs) and self.why in late

    @property
    def configuration(self) -> Configuration:
        """The configuration with this candidate alone."""
        return Configuration((self.candidate.name,))


class Search:
    """Finds the settings under which a script takes less time.

    Each candidate that the headroom supports is compared with the unchanged script in one process. Undecided ones then
    get further processes, best first, as long as time allows for what follows: the winners are combined, each is left
    out once, and the final comparison decides about the rest.

    ``run_tune`` creates it and calls ``run``, which ends when everything is decided, when the time is over, or after
    Ctrl-C. The attributes hold everything that was measured, and ``chosen`` is always confirmed.

    Args:
        candidates: The candidates to try.
        runner: Measures configurations.
        same_maths: Whether to keep only settings that leave results bitwise equal.
    """

    def __init__(self, candidates: Sequence[Candidate], runner: Runner, *, same_maths: bool = False) -> None:
        self.trials = {each.name: Trial(each) for each in candidates}
        self.runner = runner
        self.same_maths = same_maths
        self.baseline: Baseline | None = None  # None until the headroom is measured
        self.chosen = DEFAULT  # the recommendation; the unchanged script if nothing is confirmed
        self.final = Comparison()  # the chosen, or unconfirmed, settings compared with the unchanged script
        self.verdict = ""  # why nothing is recommended
        self.interrupted = False
        self.on_headroom: Callable[[Baseline], object] = lambda baseline: None
        self._total = runner.left
        self.times: dict[Configuration, list[float]] = {}  # milliseconds per step in each process
        self._defaults: list[list[float]] = []  # losses of the unchanged script: the first, and those that differ

    def run(self) -> None:
        """Search until everything is done, the budget is spent, or Ctrl-C; the attributes hold the results so far.

        Raises:
            TurboError: If the script cannot be measured.
        """
        try:
            self.baseline = self.baseline or self.measure_headroom()
            self._begin(self.baseline)
            self.screen(self._reserve)
            if not self.winners():  # nothing to confirm yet, so that time is free
                self.screen(lambda: self.runner.cost)
            self.confirm(self.eliminate(self.winners()))
        except InterruptedRunError:
            self.interrupted = True
            tried = any(trial.alone.logs for trial in self.trials.values())
            ended = "the last comparison" if tried else "any setting was tried"
            self.verdict = f"nothing is recommended: {self._why_ended()} before {ended}"
            self.verdict += self._best_so_far()
        for trial in self.trials.values():
            trial.why = trial.why or self._end(trial)

    def measure_headroom(self) -> Baseline:
        """Measure the step as it is, with one repeated batch, and the loader alone."""
        first = self._measure([DEFAULT])[DEFAULT]
        if first["status"] != "ok":
            raise TurboError(f"the script cannot be measured: {first['reason'] or first['status']}")
        accumulate = first["numbers"]["facts"].get("accumulate", 1)
        self.runner.set_pace(_pace(_seconds(first), epoch_parts(first)), accumulate)
        configurations = [DEFAULT, Configuration(mode="one batch"), Configuration(mode="loader")]
        rows = self._measure(configurations)
        step, one_batch, loader = (1e3 * _seconds(rows[configuration]) for configuration in configurations)
        # Three processes at once may be too many, for the memory of a GPU or for a port; the first one ran alone.
        as_it_is = rows[DEFAULT] if rows[DEFAULT]["status"] == "ok" else first
        facts = dict(as_it_is["numbers"]["facts"])
        step = step or 1e3 * _seconds(first)
        one_batch = one_batch or step
        facts["packing"] = rows[configurations[2]]["numbers"].get("facts", {}).get("packing", "")
        facts["phases"] = rows[configurations[1]]["numbers"].get("phases", {})
        parts = epoch_parts(as_it_is)
        facts["border_ms"], facts["validation_ms"] = (1e3 * part for part in parts[1:]) if parts else (0.0, 0.0)
        return Baseline(step_ms=step, one_batch_ms=one_batch, loader_ms=loader or step - one_batch, **facts)

    def _begin(self, baseline: Baseline) -> None:
        """Set the pace, estimate what candidates save, and exclude those that the headroom does not support."""
        self.on_headroom(baseline)
        parts = None if baseline.batches is None else (baseline.batches, baseline.border_ms / 1e3, 0.0)
        self.runner.set_pace(_pace(baseline.step_ms / 1e3, parts), baseline.accumulate)
        computes_in_half = computes_in_bfloat16() is not False or baseline.device == "cuda"
        for trial in self.trials.values():
            trial.saving = usual_saving(trial.candidate, baseline, computes_in_half)
            reason = why_not(trial.candidate, baseline)
            trial.why = f"not tried because {reason}" if reason else ""

    def state(self) -> dict[str, Any]:
        """Return the measurements of the script and of each candidate alone, as plain values."""
        alone = {name: asdict(trial.alone) for name, trial in self.trials.items()}
        baseline = None if self.baseline is None else asdict(self.baseline)
        return {"baseline": baseline, "times": self.times.get(DEFAULT, []), "losses": self._defaults, "alone": alone}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state``; combinations of winners are measured again."""
        self.baseline = None if state["baseline"] is None else Baseline(**state["baseline"])
        self.times[DEFAULT], self._defaults = list(state["times"]), list(state["losses"])
        for name, alone in state["alone"].items():
            if name in self.trials:
                self.trials[name].alone = Comparison(**alone)

    def screen(self, reserve: Callable[[], float]) -> None:
        """Compare candidates with the unchanged script: each once, then the undecided ones, best first.

        Args:
            reserve: Returns the seconds to reserve for what follows.
        """
        while chunk := self._undecided()[: max(0, min(self._group, self._affordable(reserve()) - 1))]:
            rows = self._measure([DEFAULT, *(trial.configuration for trial in chunk)])
            for trial in chunk:
                trial.alone.add(rows[trial.configuration], rows[DEFAULT])
                self._look_for_effect(trial, rows)

    def _look_for_effect(self, trial: Trial, rows: Rows) -> None:
        """End a candidate that has not gained and that, according to this package's own warning, has no effect."""
        said = [rows[configuration]["numbers"].get("no_effect", []) for configuration in (trial.configuration, DEFAULT)]
        new = [each for each in said[0] if each not in said[1]]
        if new and trial.alone.logs and trial.alone.ratio > 1.0 - SMALL_SHARE:
            trial.alone.no_effect = new[0]

    def winners(self) -> list[Trial]:
        """Return candidates that gain alone, one of each kind, best first.

        Among almost equal candidates of a kind, it is the first in the table, which is the simplest, and Lightning's
        own if it does not differ beyond noise. If there was no time to decide about any, the final comparison decides
        about the best one.
        """
        gaining = list(filter(self._keeps_maths, self._gaining() or self._promising()))
        return [self._choose(kind, gaining) for kind in dict.fromkeys(trial.candidate.kind for trial in gaining)]

    def _choose(self, kind: str, gaining: Sequence[Trial]) -> Trial:
        """Choose one candidate of a kind, and mark the others as no better."""
        best = next(trial for trial in gaining if trial.candidate.kind == kind)
        measured = [trial for trial in self.trials.values() if trial.candidate.kind == kind and trial.alone.logs]
        chosen = next(trial for trial in measured if trial in gaining and _is_as_good(trial, best))
        for trial in measured:
            if trial is not chosen:
                trial.why = trial.why or f"no better than {chosen.candidate.name} of its kind: {trial.alone}"
        return chosen

    def eliminate(self, winners: Sequence[Trial]) -> Configuration:
        """Combine the winners and leave each out once, until each of the rest contributes."""
        kept = list(winners)
        while len(kept) > 1:
            whole = self._together(kept)
            for trial in kept:
                trial.beside = Comparison()
            useless = self._leave_out(whole, kept)
            if not useless:
                break
            worst = max(useless, key=_badness)
            others = whole.without(worst.candidate.name)
            failed = f"failed: {worst.beside.error}, beside {others}" if worst.beside.error else ""
            worst.why = failed or f"no gain beside {others}: {worst.beside}"
            kept.remove(worst)
        return self._together(kept)

    def confirm(self, configuration: Configuration) -> None:
        """Compare a configuration with the unchanged script, in up to ten processes each; choose it if it gains."""
        if configuration == DEFAULT:
            self.verdict = self._nothing()
            return
        # The number is fixed in advance, because stopping at the first interval below 1 would confirm chance.
        for _ in range(max(FEWEST, min(FINAL, self._affordable() // 2))):
            rows = self._measure([DEFAULT, configuration])
            self.final.add(rows[configuration], rows[DEFAULT])
            if self.final.error:
                break
        self.verdict = self._objection(configuration)
        if not self.verdict:
            self.chosen = configuration
        for name in configuration.names:
            self.trials[name].kept = not self.verdict
            self.trials[name].why = self._in_the_last_comparison(self.trials[name])

    def result(self, configuration: Configuration, comparison: Comparison) -> str:
        """Return the effect of a configuration on the result, from the losses and the table of candidates.

        - If the script's losses differ between processes: what the table says.
        - If the configuration has the same losses and the table says "other maths" for none of its candidates: same
        bits. Other maths, such as another order of samples in the next epoch, need not show in the losses.
        - Otherwise: the larger change of what the losses show and what the table says.
        """
        repeatable = all(compare_losses(each, self._defaults[0]) == "same bits" for each in self._defaults)
        measured = compare_losses(*comparison.losses) if repeatable else ""
        declared = [self.trials[name].candidate.result for name in configuration.names]
        same = measured == "same bits" and "other maths" not in declared
        return measured if same else max([measured, *declared], key=SEVERITY.index)

    def _nothing(self) -> str:
        if late := self.untried:
            return f"nothing is recommended: {late} of {len(self.trials)} settings were not tried, for want of time"
        return "nothing helps here"

    @property
    def untried(self) -> int:
        """Number of settings that were left out for lack of time."""
        return sum(trial.is_untried for trial in self.trials.values())

    @property
    def more_minutes(self) -> float:
        """Minutes needed to try them: in groups, each beside the unchanged script, and the best ones again."""
        return 1.5 * self.untried * (1 + 1 / self._group) * self.runner.cost / 60

    def _objection(self, configuration: Configuration) -> str:
        """Return why a configuration is not recommended after the final comparison."""
        if self.final.error:
            return f"nothing is recommended: {configuration} failed in the last comparison: {self.final.error}"
        if not self.final.gains:
            return f"{self._nothing()}; the last comparison did not confirm {configuration}"
        if self.same_maths and self.result(configuration, self.final) != "same bits":
            return f"nothing is recommended: {configuration} changes the losses"
        return ""

    def _in_the_last_comparison(self, trial: Trial) -> str:
        if not self.verdict:
            return f"kept: alone {trial.alone}"
        if self.final.error:
            return f"failed: {self.final.error}, in the last comparison"
        if self.final.gains:
            return "failed: it changes the losses, which --same-maths refuses"
        return f"no gain in the last comparison: {self.final}"

    def _end(self, trial: Trial) -> str:
        """Return the outcome of a candidate about which nothing else is known."""
        if trial.alone.error:
            return f"{'not tried because' if trial.alone.refused else 'failed:'} {trial.alone.error}"
        if trial.alone.no_effect:
            return f"no effect: {trial.alone.no_effect}"
        if trial.alone.gains:
            return f"no gain confirmed, because {self._why_ended()}: {trial.alone}"
        if trial.alone.interval:
            return f"no gain: {trial.alone}"
        if trial.alone.logs:
            return f"undecided because {LATE if self.final.logs else self._why_ended()}: {trial.alone}"
        if self.interrupted:
            return f"not tried because {self._why_ended()}"
        return f"not tried because {LATE if self.final.logs else OVER}"

    def _why_ended(self) -> str:
        return ENDED if self.interrupted and self.runner.left > 0 else OVER

    @property
    def _group(self) -> int:
        """Number of configurations alive at once, which must all fit into the memory of a GPU."""
        return 1 if self.baseline is not None and self.baseline.device == "cuda" else GROUP

    def _undecided(self) -> list[Trial]:
        """Return candidates that need processes: untried ones by possible savings, then the best ones."""
        return sorted(self._untried(), key=lambda trial: trial.saving, reverse=True) or self._rivals()

    def _untried(self) -> list[Trial]:
        """Return candidates that no process has measured."""
        return [trial for trial in self.trials.values() if not (trial.why or trial.alone.error or trial.alone.logs)]

    def _rivals(self) -> list[Trial]:
        """Return candidates that were tried and may still be the best of their kind, best first."""
        best: dict[str, Trial] = {}
        for trial in self._gaining():
            best.setdefault(trial.candidate.kind, trial)
        tried = [trial for trial in self.trials.values() if trial.alone.logs and not (trial.why or trial.alone.decided)]
        rivals = [trial for trial in tried if _can_beat(trial, best.get(trial.candidate.kind))]
        return sorted(rivals, key=lambda trial: trial.alone.ratio)

    def _promising(self) -> list[Trial]:
        """Return candidates of the best kind that may gain but have too few processes, best first."""
        found = [trial for trial in self._rivals() if trial.alone.ratio < 1.0 - SMALL_SHARE]
        return [trial for trial in found if trial.candidate.kind == found[0].candidate.kind]

    def _best_so_far(self) -> str:
        best = next(iter(self._gaining() or self._promising()), None)
        return f"; the best so far is {best.configuration}: {best.alone}" if best else ""

    def _gaining(self) -> list[Trial]:
        """Return candidates that gain, best first."""
        gaining = [trial for trial in self.trials.values() if trial.alone.gains and not trial.alone.error]
        return sorted(gaining, key=lambda trial: trial.alone.ratio)

    def _compare_without(self, whole: Configuration, trials: Sequence[Trial]) -> None:
        rows = self._measure([whole, *(whole.without(trial.candidate.name) for trial in trials)])
        for trial in trials:
            without = rows[whole.without(trial.candidate.name)]
            trial.beside.add(rows[whole], without)
            trial.cures = without["status"] == "ok"

    def _keeps_maths(self, trial: Trial) -> bool:
        if self.same_maths and self.result(trial.configuration, trial.alone) != "same bits":
            trial.why = "failed: it changes the losses, which --same-maths refuses"
            return False
        return True

    def _together(self, trials: Sequence[Trial]) -> Configuration:
        names = {trial.candidate.name for trial in trials}
        return Configuration(tuple(name for name in self.trials if name in names))

    def _leave_out(self, whole: Configuration, kept: Sequence[Trial]) -> list[Trial]:
        """Compare a configuration with itself minus each candidate; return candidates that contribute nothing."""
        for _ in range(ELIMINATION):
            for start in range(0, len(kept), self._group):
                chunk = kept[start : start + self._group]
                if self._affordable(self._last()) <= len(chunk):
                    # The final comparison decides about the rest.
                    return [trial for trial in kept if trial.beside.decided and not trial.beside.gains]
                self._compare_without(whole, chunk)
        return [trial for trial in kept if not trial.beside.gains]

    def _last(self) -> float:
        """Return the seconds of the final comparison, at most half of the time, to leave time for trials."""
        return min(2 * FINAL * 1.2 * self.runner.cost, 0.5 * self._total)

    def _reserve(self) -> float:
        """Return the seconds of everything after the screening, estimated from what gains so far."""
        kinds = len({trial.candidate.kind for trial in self._gaining()})
        # In each round each winner is left out once, and the whole is measured again for each group.
        parts = 0 if kinds < 2 else kinds + math.ceil(kinds / self._group)
        return min(self._last() + ELIMINATION * parts * 1.2 * self.runner.cost, 0.5 * self._total)

    def _affordable(self, reserve: float = 0.0) -> int:
        """Return how many processes there is time for besides a reserve; at least two before anything was tried."""
        number = int((self.runner.left - reserve) / self.runner.cost)
        tried = any(trial.alone.logs or trial.alone.error for trial in self.trials.values())
        return number if tried else max(2, number)

    def _measure(self, configurations: Sequence[Configuration]) -> Rows:
        rows = self.runner.measure(configurations)
        losses = rows.get(DEFAULT, {}).get("numbers", {}).get("losses")
        if losses and compare_losses(losses, (self._defaults or [[]])[0]) != "same bits":
            self._defaults.append(losses)
        for configuration, row in rows.items():
            if row["status"] == "ok":
                self.times.setdefault(configuration, []).append(1e3 * _seconds(row))
        return rows


def _badness(trial: Trial) -> tuple[bool, float, float]:
    """Return a key that is largest for the candidate to drop among those that contribute nothing."""
    return bool(trial.beside.error) and trial.cures, trial.beside.ratio, trial.alone.ratio


def _is_as_good(trial: Trial, best: Trial) -> bool:
    """Return whether a candidate is almost as fast as the best of its kind; Lightning's own only must not differ."""
    if trial.alone.ratio < (1.0 + SMALL_SHARE) * best.alone.ratio:
        return True
    difference = interval_of(trial.alone.logs, best.alone.logs)
    # With one process each, the noise is unknown: half the gain may be as good.
    may_be = trial.alone.ratio**2 <= best.alone.ratio if difference is None else difference[0] <= 1.0
    return trial.candidate.is_stock and may_be


def _can_beat(trial: Trial, best: Trial | None) -> bool:
    """Return whether a candidate may beat the best gaining one of its kind, if there is one."""
    return best is None or best.alone.interval is None or trial.alone.ratio <= best.alone.interval[1]


def _pace(step: float, parts: tuple[int, float, float] | None) -> float:
    """Return the seconds per step including its share of the border, because rounds may include borders."""
    if parts is None:
        return step
    batches, border, _ = parts
    return step + border / batches


def _seconds(row: Mapping[str, Any]) -> float:
    """Return the median seconds per step; 0 if nothing was measured."""
    return statistics.median(seconds_by_sweep(row).values() or [0.0])
