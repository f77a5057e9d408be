"""Rules about number formats, loss scaling, optimizers, accumulation and schedulers."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, hits_of_calls, rule

__all__: list[str] = []

MANY_GROUPS = 32
"""Number of parameter groups that is worth reporting."""
OPTIMIZER = 0.05
"""Share of the step from which an optimizer with many groups justifies a warning."""


@rule(
    "loop-optimizer",
    "doctor",
    "Build the optimizer with fused=True, or leave foreach at its default.",
)
def _loop_optimizer(facts: Facts) -> Iterator[Hit]:
    cost = f"part of {facts.phases.get('optimizer', 0.0) * 1e3:.2f} ms a step in the optimizer (measured)"
    # By default torch uses foreach on a GPU, where fused is worth suggesting; elsewhere only foreach=False is a
    # problem.
    for each in facts.optimizers:
        if each.one_by_one:
            yield Hit(f"{each.name}(foreach=False) steps its parameters one by one", each.site, cost)
        elif facts.cuda and each.can_fuse:
            yield Hit(f"{each.name} without fused=True", each.site, cost, "info")


@rule(
    "small-groups",
    "merged-parameter-groups",
    "Merge the groups before the optimizer is made: AdamW(lightning_turbo.optim.merge_param_groups(groups)).",
    by_time=True,
)
def _small_groups(facts: Facts) -> Iterator[Hit]:
    seconds = facts.phases.get("optimizer", 0.0)
    for each in facts.optimizers:
        if each.groups < MANY_GROUPS or each.groups < 2 * each.kinds:
            continue
        what = (
            f"{each.name} has {each.groups} groups of parameters of {each.kinds} kinds: foreach and fused take one "
            "group at a time"
        )
        level = "warning" if seconds > OPTIMIZER * facts.step else "info"
        yield Hit(what, each.site, "part of {ms} ms a step in the optimizer (measured)", level, seconds=seconds)


@rule("short-window", "exact-accumulation", "Use ExactAccumulation, or drop the last batches.")
def _short_window(facts: Facts) -> Iterator[Hit]:
    rest = facts.run.batches % facts.run.accumulate
    # With infinitely many batches the remainder is NaN.
    if rest > 0 and facts.run.ends_epoch and not facts.run.exact_windows:
        what = f"the last {rest} of {facts.run.batches} batches are divided by {facts.run.accumulate}"
        cost = f"the epoch's last step is {rest}/{facts.run.accumulate} of what it should be"
        yield Hit(what, None, cost)


@rule(
    "stepped-per-epoch",
    "cyclic-lr",
    "Return {'scheduler': ..., 'interval': 'step'} from configure_optimizers; cyclic_lr does it for CyclicLR.",
)
def _stepped_per_epoch(facts: Facts) -> Iterator[Hit]:
    # In manual optimization the user steps the scheduler, and ``interval`` means nothing.
    for each in facts.schedulers if facts.run.automatic else ():
        if each.interval == "epoch" and each.length > facts.run.epochs:
            what = (
                f"{each.name} is stepped once an epoch: {each.length} steps to {each.aim}, in {facts.run.epochs} epochs"
            )
            yield Hit(what, each.site, "the schedule is not the one you wrote")


@rule(
    "float32",
    "apex-amp",
    "Use ApexAMP or Trainer(precision='bf16-mixed' or '16-mixed'), or at least "
    "torch.set_float32_matmul_precision('high').",
)
def _float32(facts: Facts) -> Iterator[Hit]:
    # Tensor cores came with compute capability 7.0; TF32, which lets them process float32, came with 8.0.
    major, minor = facts.run.capability
    fast = facts.run.tf32 and major >= 8
    if major >= 7 and facts.run.precision.startswith("32") and not fast:
        what = f"float32 (precision={facts.run.precision!r}) on a GPU with tensor cores (capability {major}.{minor})"
        cost = "1.5 to 3 times the time for models made of large matrix products (estimated)"
        yield Hit(what, None, cost)


@rule(
    "clip-before-unscale",
    "apex-amp",
    "Call scaler.unscale_(optimizer) before clipping, or leave clipping to Trainer(gradient_clip_val=...).",
)
def _clip_before_unscale(facts: Facts) -> Iterator[Hit]:
    what = "{name} clips gradients that still carry the loss scale"
    return hits_of_calls(facts, "clip", what, "wrong results", "error")
