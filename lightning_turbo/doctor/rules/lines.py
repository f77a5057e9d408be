"""Rules about the user's own lines, and about the processor's threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lightning_turbo.doctor.facts import BOUNDS, NOTICEABLE, SLOW_LINE, WAITING, Facts, LineTime
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__: list[str] = []

LEAST = 0.25
"""Seconds outside of steps that justify a warning; a choice."""
SHORT = 60
"""Characters of a line that are shown."""
PHASES = {
    "data": "loading",
    "copy": "the copy of the batch",
    "forward": "training_step",
    "backward": "backward",
    "optimizer": "the optimizer's step",
    "logging": "self.log",
}
PARTS = {"validation": "validation", "validation start": "validation", "metrics": "metrics and logging"}
COMPUTES = (
    "Do it once before the training, in the dataset, where worker processes or a thread do it ahead, or by torch on "
    "the whole batch in place of a loop; a metric by update(...) in the step and compute() once an epoch."
)
"""Remedies where the line has no own one."""
REMEDIES = {
    "logging": "Log fewer values, or less often: Trainer(log_every_n_steps=...) and a condition on batch_idx around "
    "self.log; on_step=False, on_epoch=True keeps the mean alone.",
    "copy": "Do the work of the hooks around the copy in the dataset, or by AugmentBatches on the device.",
    "validation": "Do it by torch on the whole batch, for a part of the batches, or validate less often: "
    "Trainer(check_val_every_n_epoch=...).",
}


@rule("slow-line", "doctor", COMPUTES, by_time=True)
def _slow_line(facts: Facts) -> Iterator[Hit]:
    for line in facts.slow_lines():
        if not line.waits or line.phase in ("data", "logging"):
            yield from _at_sites(line, _in_steps(facts, line, line.own, "takes"))
    for line in facts.lines:
        if line.part in PARTS and not _is_little(facts, line):
            yield from _at_sites(line, _between(facts, line))


@rule("waits-without-computing", "background-prefetch", COMPUTES, by_time=True)
def _waits_without_computing(facts: Facts) -> Iterator[Hit]:
    for line in facts.slow_lines():
        if line.waits and line.phase not in ("data", "logging"):
            yield from _at_sites(line, _in_steps(facts, line, line.own, "waits without computing for"))


@rule("torch-outside", "doctor", "Compute it less often, in fewer calls, or inside of the network's modules.")
def _torch_outside(facts: Facts) -> Iterator[Hit]:
    least = max(SLOW_LINE, WAITING * facts.step)
    for line in facts.lines:
        if facts.step and line.part == "steps" and line.phase in BOUNDS["compute"] and line.torch >= least > line.own:
            hit = _in_steps(facts, line, line.torch, "takes")
            what = f"{hit.what}: torch, outside of the network's modules"
            yield from _at_sites(line, replace(hit, what=what, level="info"))


def _at_sites(line: LineTime, hit: Hit) -> Iterator[Hit]:
    """Yield a hit at each line of a function: one finding, with the time of the function."""
    for number, site in enumerate(line.sites):
        seconds = {} if number == 0 else {"seconds": 0.0, "epoch_seconds": 0.0}
        yield replace(hit, site=site, cause=f"{site.file} {site.function} {line.part} {line.phase}", **seconds)


def _in_steps(facts: Facts, line: LineTime, seconds: float, verb: str) -> Hit:
    where = f" {line.where}" if line.where else ""
    place = PHASES.get(line.phase, line.phase)
    what = f"{_shown(line)} {verb} {seconds / facts.step:.0%} of the step, in {place}{where}"
    # Many scripts log a value and load cheap samples in each step: a few milliseconds are no fault of theirs.
    short = {"logging": seconds, "data": facts.phases.get("data", 0.0)}.get(line.phase, math.inf) <= NOTICEABLE
    level = "info" if short else "warning"
    return Hit(what, line.site, "{ms} ms a step (sampled)", level, seconds=seconds, remedy=_remedy(facts, line))


def _between(facts: Facts, line: LineTime) -> Hit:
    share = line.seconds / (facts.fit.of() or 1.0)
    what = f"{_shown(line)} takes {line.seconds:.2f} s, in {PARTS[line.part]} {line.where}".rstrip()
    level = "warning" if line.seconds > LEAST and share > WAITING else "info"
    cost = f"{line.seconds:.2f} s, {share:.0%} of what was seen (sampled)"
    return Hit(what, line.site, cost, level, epoch_seconds=line.seconds, remedy=REMEDIES.get(line.part, ""))


def _is_little(facts: Facts, line: LineTime) -> bool:
    return line.own <= LEAST / 5 or line.own <= WAITING / 2 * facts.fit.of()


def _shown(line: LineTime) -> str:
    """Return the line as the user wrote it, with the function that it calls if the line does not say."""
    text = line.text if len(line.text) <= SHORT else f"{line.text[:SHORT]}..."
    call = f", in {line.call}()" if line.call and line.call not in line.text and line.call.isidentifier() else ""
    return f"`{text}`{call}"


def _remedy(facts: Facts, line: LineTime) -> str:
    """Return what helps, where it has an effect on the loader at hand."""
    if line.phase != "data":
        return REMEDIES.get(line.phase, "")
    loader = facts.loader
    cheaper = "Make it cheaper: once before the training, NumPy or torch in place of a loop, PackedDataset."
    if not loader.standard or facts.phases.get("data", 0.0) <= NOTICEABLE:
        return cheaper
    if not loader.workers:
        ahead = "DataLoader(num_workers=1, persistent_workers=True) and more do it ahead."
        return f"{ahead} {cheaper}"
    return f"Raise num_workers. {cheaper}" if loader.workers < facts.run.cores else cheaper


@rule(
    "processor-threads",
    "worker-tuning",
    "Set OMP_NUM_THREADS, or torch.set_num_threads before the training, so that the threads of all ranks and workers "
    "fit the cores; lightning-turbo tune SCRIPT measures how many help.",
)
def _processor_threads(facts: Facts) -> Iterator[Hit]:
    run, workers = facts.run, facts.loader.workers
    wanted = run.local_ranks * (run.threads + workers)
    ranks = f"{run.local_ranks} ranks with " if run.local_ranks > 1 else ""
    beside = f" and {workers} worker processes" if workers else ""
    if wanted > run.cores and run.threads > 1:
        what = f"{ranks}{run.threads} threads of torch{beside} share {run.cores} cores"
        used = f"the timed steps used {facts.cores_used:.1f} cores (measured)" if facts.cores_used else "not measured"
        level = "warning" if run.local_ranks * run.threads > run.cores else "info"
        yield Hit(what, None, used, level)
