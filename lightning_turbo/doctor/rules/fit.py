"""Rules about the whole fit: what an epoch costs besides its steps, and hooks."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import NOTICEABLE, Facts, Loader, Site
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__: list[str] = []

SHARE = 0.10
"""Share of an epoch from which a part besides its steps justifies a warning; a choice, not a measurement."""
LEAST = 0.25
"""Seconds that justify a warning; a choice as well."""
FEW_BATCHES = 50
"""In epochs with fewer batches, the start of worker processes matters, if it was not measured."""


def _level(facts: Facts, seconds: float) -> str:
    """Return the level of something that takes this many seconds of what was seen."""
    return "warning" if seconds > LEAST and seconds > SHARE * facts.fit.of() else "info"


def _is_little(facts: Facts, seconds: float) -> bool:
    return seconds <= LEAST / 5 or seconds <= SHARE / 2 * facts.fit.of()


def _hit(facts: Facts, what: str, seconds: float, *, site: Site | None = None, remedy: str = "") -> Hit:
    share = seconds / (facts.fit.of() or 1.0)
    of = "the epoch" if facts.fit.is_epoch else f"the {facts.fit.of():.1f} s that were seen"
    cost = f"{seconds:.2f} s, {share:.0%} of {of} (measured)"
    return Hit(what, site, cost, _level(facts, seconds), epoch_seconds=seconds, remedy=remedy)


@rule(
    "persistent-workers",
    "worker-tuning",
    "DataLoader(persistent_workers=True), unless the dataset changes between epochs.",
)
def _persistent_workers(facts: Facts) -> Iterator[Hit]:
    fit = facts.fit
    epochs = facts.run.epochs
    if _starts_again(facts.loader) and epochs != 1:
        what = f"persistent_workers=False: each epoch starts {facts.loader.workers} new workers"
        seconds = fit.of("first batch") if fit.is_epoch else 0.0
        if seconds:
            yield _hit(facts, what, seconds, site=facts.loader.site)
        else:
            cost = "the start of the processes and the import of the program, once an epoch"
            yield Hit(what, facts.loader.site, cost, "warning" if facts.run.batches < FEW_BATCHES else "info")
    loader = facts.validation_loader
    seconds = fit.of("validation start")
    if _starts_again(loader) and seconds and (fit.validations > 1 or epochs > 1):
        what = f"persistent_workers=False: each validation starts {loader.workers} new workers"
        yield _hit(facts, what, seconds, site=loader.site)


def _starts_again(loader: Loader) -> bool:
    return loader.workers > 0 and not loader.persistent_workers


@rule(
    "slow-first-batch",
    "worker-tuning",
    "Look at what the sampler, the dataset's __iter__ and worker_init_fn do as an epoch begins, and do it once. "
    "Datasets that are pickled to the workers should hold arrays in place of long lists, or load by PrefetchLoader.",
)
def _slow_first_batch(facts: Facts) -> Iterator[Hit]:
    # The rule about persistent workers covers restarted worker processes.
    if _starts_again(facts.loader) or not facts.fit.is_epoch:
        return
    beyond = facts.fit.of("first batch") - facts.phases.get("data", 0.0)
    if not _is_little(facts, beyond) and facts.run.epochs > 1:
        what = f"the first batch of an epoch takes {beyond:.2f} s longer than others"
        yield _hit(facts, what, beyond, site=facts.line_in(beyond, "first batch") or facts.loader.site)


@rule(
    "long-validation",
    "doctor",
    "Validate less often, Trainer(check_val_every_n_epoch=...), or a part, Trainer(limit_val_batches=...); with larger "
    "batches, as nothing is kept for backward; with worker processes or Prefetch, as in training.",
)
def _long_validation(facts: Facts) -> Iterator[Hit]:
    fit = facts.fit
    seconds = fit.of("validation start", "validation")
    is_longer = seconds > fit.of("steps", "first batch")
    often = fit.validations > 1 or (fit.validations == 1 and not fit.is_epoch)
    if not seconds or not (is_longer or (often and seconds > SHARE * fit.of())):
        return
    why = "longer than its training" if is_longer else f"as it comes every {fit.batches / fit.validations:.0f} steps"
    what = f"validation takes {seconds:.2f} s of {fit.of():.2f} s, {why}"
    yield _hit(facts, what, seconds, site=facts.line_in(seconds, "validation") or facts.validation_step)


@rule(
    "slow-metrics",
    "doctor",
    "Compute less often, or cheaper metrics: what a metric keeps of each sample makes compute longer with each batch. "
    "Metrics that are equal on all ranks need no synchronization. A logger that waits for a server can write less "
    "often.",
)
def _slow_metrics(facts: Facts) -> Iterator[Hit]:
    seconds = facts.fit.of("metrics")
    if not _is_little(facts, seconds):
        what = "metrics are computed, brought together and logged at the end of a validation and of an epoch"
        yield _hit(facts, what, seconds, site=facts.line_in(seconds, "metrics") or facts.validation_step)


@rule(
    "slow-checkpoint",
    "turbo-strategy",
    "Write in the background, AtomicCheckpointIO(background=True), less often, ModelCheckpoint(every_n_epochs=...), or "
    "less, ModelCheckpoint(save_weights_only=True) where nothing resumes.",
)
def _slow_checkpoint(facts: Facts) -> Iterator[Hit]:
    fit = facts.fit
    seconds = fit.of("checkpoints")
    if not _is_little(facts, seconds):
        longer = ", longer than all else" if 2 * seconds > fit.of() else ""
        what = f"checkpoints take {seconds:.2f} s, {fit.saves} of them{longer}"
        yield _hit(facts, what, seconds, site=facts.line_in(seconds, "checkpoints"))


@rule("slow-hook", "doctor", "Do its work less often, or in a process or thread of its own.", by_time=False)
def _slow_hook(facts: Facts) -> Iterator[Hit]:
    for hook in facts.slow_hooks():
        level = "warning" if hook.seconds > SHARE * facts.step and hook.seconds > NOTICEABLE else "info"
        cost = f"{{ms}} ms a step, {hook.seconds / facts.step:.0%} of it (measured)"
        what = f"{hook.shown} takes {hook.seconds * 1e3:.2f} ms in each step"
        yield Hit(what, hook.site, cost, level, seconds=hook.seconds)
    for hook in facts.fit.hooks:
        if not hook.in_steps and not _is_little(facts, hook.seconds):
            what = f"{hook.shown} takes {hook.seconds:.2f} s, at the border of an epoch"
            yield _hit(facts, what, hook.seconds, site=hook.site)
