"""The table of all rules, and what they say together."""

from __future__ import annotations

from lightning_turbo.doctor.advice import LEVELS, Finding, Rule
from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules import data, graphs, model, optimizers, precision, schedules, settings, waits

__all__ = ["RULES", "diagnose"]

RULES: tuple[Rule, ...] = (
    waits.host_sync,
    waits.progress_bar_sync,
    waits.array_copy,
    waits.made_on_host,
    waits.round_trip,
    waits.housekeeping,
    graphs.retained_graph,
    graphs.retain_graph,
    graphs.memory_growth,
    settings.anomaly_mode,
    settings.gradcheck,
    settings.profiler,
    settings.deterministic,
    settings.benchmark_off,
    settings.benchmark_thrashes,
    data.waits_for_data,
    data.workers,
    data.pin_memory,
    data.persistent_workers,
    data.lost_sampler,
    data.frozen_set_epoch,
    data.wide_batch,
    data.page_faults,
    precision.float32,
    precision.odd_sizes,
    precision.bce_under_amp,
    precision.clip_before_unscale,
    precision.clips_nothing,
    precision.falling_scale,
    precision.tiny_amp,
    optimizers.loop_optimizer,
    optimizers.gradients_kept,
    optimizers.unused_parameters,
    optimizers.short_window,
    model.bias_before_norm,
    model.data_parallel,
    model.validation_graph,
    schedules.stepped_per_epoch,
    schedules.never_turns,
    schedules.cycled_beta,
    schedules.moves_on_skip,
    schedules.before_optimizer,
)


def diagnose(facts: Facts) -> list[Finding]:
    """Apply every rule to ``facts``.

    Args:
        facts: What was measured.

    Returns:
        The findings, the gravest first and, among equals, the costliest first.
    """
    findings = [finding for each in RULES for finding in each.findings(facts)]
    return sorted(findings, key=lambda f: (LEVELS.index(f.level), -f.seconds))
