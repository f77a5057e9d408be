"""The measurement of one fit: the listeners of its clock, and the facts that they collect."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from lightning_turbo.doctor import collect
from lightning_turbo.doctor.clock import FitClock, Listener, Plan, phase_of
from lightning_turbo.doctor.facts import BOUNDS, Facts, FitFacts, Rank, Seen, Site
from lightning_turbo.doctor.fit_timing import FitTiming, Length, Projection, fit_length
from lightning_turbo.doctor.guard import Guard
from lightning_turbo.doctor.loaders import Draws
from lightning_turbo.doctor.ranks import RankTiming, rank_facts
from lightning_turbo.doctor.reads import BytesRead
from lightning_turbo.doctor.retention import Retention
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.timing import Segment, StepTiming, longest_action, sum_phases, typical_seconds
from lightning_turbo.doctor.watch import StepWatch
from lightning_turbo.nn.compile import CompileReport, compile_counts

__all__ = ["Session"]

# Strategies with plain tensors; with others, a function mode might change something.
_PLAIN = {"SingleDeviceStrategy", "DDPStrategy"}
_FAST_PATHS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)
ANOMALY = ("detect_anomaly", "set_detect_anomaly")


class Compilations(Listener):
    """Counts what torch compiles; compiling during the warm-up does not count as recompiling.

    Its session creates it when fit begins, and ``stop`` ends it. ``before`` is counted before fit, ``warm`` after the
    warm-up if the run gets that far.
    """

    def __init__(self, plan: Plan) -> None:
        self.before = compile_counts()
        self.warm: CompileReport | None = None
        self.after: CompileReport | None = None
        self._plan = plan

    def begin_step(self, step: int) -> None:
        """Count at the end of the warm-up."""
        if step == self._plan.warmup:
            self.warm = compile_counts()

    def stop(self) -> None:
        """Count at the end."""
        self.after = compile_counts()

    def breaks(self) -> dict[str, int]:
        """Return the graph breaks, by line and reason."""
        return {} if self.after is None else self.after.since(self.before).breaks

    def recompilations(self) -> dict[str, int]:
        """Return what was recompiled, by function and reason; nothing if the run ended in its warm-up."""
        return {} if self.after is None or self.warm is None else self.after.since(self.warm).recompilations


class Session:
    """The measurement of one fit. It owns the clock and its listeners, so that none of them outlives the report.

    The ``Doctor`` creates it when fit begins; ``stop`` ends it after the last step, at the end of fit or on an
    exception. Each fact is measured by exactly one listener.

    Args:
        plan: The steps that pass, are timed and are watched.
        trainer: The Trainer, whose fit begins.
        guard: Keeps errors of listeners away from the run.
        begin: When this process started or the Doctor was created, as in ``time.time``.
        frame: The caller's frame, on whose stack the script's call of ``fit`` is found.
    """

    def __init__(self, plan: Plan, trainer: Any, guard: Guard, begin: float, frame: FrameType) -> None:
        self.trainer = trainer
        module, cuda = trainer.lightning_module, trainer.strategy.root_device.type == "cuda"
        self.fetches = "dataloader_iter" in inspect.signature(module.training_step).parameters
        self.plan = Plan(plan.warmup, plan.timed, 0) if self.fetches else plan
        mine = [each for each in trainer.callbacks if not type(each).__module__.startswith("lightning_turbo.doctor.")]
        own = [each for each in mine if not type(each).__module__.startswith(("lightning.", "pytorch_lightning."))]
        self.sources = Sources([module, trainer.datamodule, *own])
        self.fit = self.sources.site(frame, through=True)
        self.clock = FitClock(guard)
        self.watch = StepWatch(self.sources, guard, self.plan, cuda=cuda, why_not=self._why_not_inside)
        self.retention = Retention(self.plan, module, [each for each in own if self.sources.owns(type(each))])
        self.compilations = Compilations(self.plan)
        self.draws = Draws(self.plan, trainer)
        self.reads = BytesRead(self.plan)
        self.ranks = RankTiming(begin, self.plan)
        self.parts = FitTiming()
        self.steps = StepTiming(self.plan, cuda)
        self.batch: collect.BatchFacts | None = None
        self.length = Length()
        self.notes: tuple[str, ...] = ()

    def begin(self, further: Sequence[Listener]) -> None:
        """Start, with additional listeners, which receive the beginning of a step after all others."""
        # The last to receive the beginning of a step is the first to receive its end, so its steps exclude other
        # listeners.
        listeners = (
            self.compilations, self.retention, self.reads, self.draws, self.ranks, self.parts, self.watch, self.steps,
        )  # fmt: skip
        self.clock.begin(self.trainer, (*listeners, *further))

    def look_at_length(self) -> None:
        """Record how long the script lets the fit be, before anything shortens it."""
        self.length = fit_length(self.trainer, collect.count_epochs(self.trainer))

    def look_at(self, batch: Any) -> None:
        """Record the contents of the first batch."""
        # ``None`` if ``training_step`` fetches the batch itself.
        if self.batch is None and batch is not None:
            self.batch = collect.batch_facts(batch)

    def _why_not_inside(self) -> str:
        """Return why something in the run would behave differently under a function mode; empty if nothing would."""
        strategy = type(self.trainer.strategy)
        modules = list(self.trainer.lightning_module.modules())
        if any(map(_is_compiled, modules)):
            return "the model is compiled"
        if _has_compiled():
            return "torch.compile has compiled code in this process, until torch._dynamo.reset() drops it"
        if _base_of(strategy) not in _PLAIN:
            return f"{strategy.__name__} may split tensors over devices"
        if any(map(_is_fast, modules)):
            return "attention layers in eval mode have a fast path that watching would close"
        return ""

    def stop(self) -> None:
        """Stop the clock; the Trainer's profiler notifies nobody any more."""
        self.watch.pause()
        self.clock.stop()
        self.compilations.stop()

    def shortfall(self, interrupted: str = "") -> str:
        """Say what is missing if the run was too short; empty if nothing is.

        Args:
            interrupted: The name of the exception that ended the run, if one did.
        """
        plan = self.plan
        timed = len(self.steps.steps)
        if self.clock.step >= plan.needed:
            return ""
        end = f"was ended by {interrupted}" if interrupted else "ended"
        return (
            f"The run {end} after {self.clock.step} of the {plan.needed} steps that the doctor needs: {timed} were "
            f"timed and {self.watch.watched} watched, so findings may be missing. "
            "Train longer, or use Doctor(warmup=1, timed=1, watched=2)."
        )

    def rank(self) -> Rank:
        """Return what this rank of several spent its time on."""
        loader = collect.loader_facts(self.trainer, self.sources, self.fit).site
        owners = [self.trainer.lightning_module, self.trainer.datamodule, *self.trainer.callbacks]
        facts = rank_facts(self.steps, self.ranks.seconds, owners, self.sources, loader)
        facts.sites["before fit"] = self.fit
        return facts

    def facts(self, ranks: tuple[Rank, ...] = ()) -> tuple[Facts, list[Segment]]:
        """Return everything that was measured, including the facts of all ``ranks``, and the mean step."""
        trainer = self.trainer
        module = self.trainer.lightning_module
        watch = self.watch
        sources = self.sources
        segments = self.steps.mean_step()
        steps = self.steps.each_step()
        batch = self.batch or collect.BatchFacts()
        seen = Seen(
            watched=watch.watched,
            calls=watch.calls(),
            retained=self.retention.find(sources),
            anomaly=watch.anomaly,
            anomaly_site=sources.setting(*ANOMALY) if watch.anomaly else None,
            biases=collect.cancelled_biases(module, watch.biases, sources),
            graph_breaks=self.compilations.breaks(),
            recompilations=self.compilations.recompilations(),
        )
        loader = collect.loader_facts(trainer, sources, self.fit, self.draws.drew)
        facts = Facts(
            run=collect.run_facts(trainer),
            seen=seen,
            timed=len(self.steps.steps),
            steps=tuple(sum(step.values()) for step in steps),
            phases=sum_phases(segments),
            typical=typical_seconds(steps, 1),
            read=self.reads.mean,
            longest_hook=longest_action(segments, BOUNDS["loop"]),
            loader=loader,
            validation_loader=collect.validation_loader_facts(trainer, sources, self.fit),
            fit=self._fit_facts(steps, bool(loader.workers and not loader.persistent_workers)),
            training_step=sources.method(module, "training_step"),
            validation_step=sources.method(module, "validation_step"),
            batch=batch.size,
            objects=batch.objects,
            wide=batch.wide,
            convolutions=collect.has_contiguous_convolutions(module),
            optimizers=collect.optimizer_facts(trainer, sources),
            schedulers=collect.scheduler_facts(trainer, sources),
            ranks=ranks,
            notes=self._all_notes(),
        )
        return facts, segments

    def _all_notes(self) -> tuple[str, ...]:
        notes = list(self.notes)
        if self.watch.table is None:
            notes.append("another profile function is set: calls such as self.log(prog_bar=True) were not watched")
        reason = "training_step(dataloader_iter) fetches its batches itself" if self.fetches else self.watch.reason
        if reason:
            notes.append(f"{reason}: the run was timed, and not watched from inside")
        return tuple(notes)

    def _fit_facts(self, steps: list[dict[tuple[str, str], float]], starts_again: bool) -> FitFacts:
        hooks = {
            action: seconds
            for action, seconds in typical_seconds(steps, 0).items()
            if action.startswith("[") and phase_of(action) == "hooks"
        }
        step = sum(sum(each.values()) for each in steps) / max(len(steps), 1)
        projection = Projection(self.parts, self.clock.epochs, self.length, step, starts_again, self.plan.needed)
        return projection.facts(hooks, self._site_of_action)

    def _site_of_action(self, action: str) -> Site | None:
        """Return the line of a hook of the LightningModule, the DataModule or a callback."""
        owner, _, hook = action.rpartition(".")
        trainer = self.trainer
        names = {f"[LightningModule]{type(trainer.lightning_module).__name__}": trainer.lightning_module}
        names |= {f"[LightningDataModule]{type(trainer.datamodule).__name__}": trainer.datamodule}
        names |= {f"[Callback]{each.state_key}": each for each in trainer.callbacks}
        return self.sources.method(names[owner], hook) if owner in names else None


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was returned by ``torch.compile`` or compiled by its own ``compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _base_of(strategy: type) -> str:
    """Return the nearest of Lightning's own strategies; those for DeepSpeed and XLA are subclasses of DDP's."""
    bases = (base for base in strategy.__mro__ if base.__module__.startswith(("lightning.", "pytorch_lightning.")))
    return next(base.__name__ for base in bases)


def _is_fast(module: torch.nn.Module) -> bool:
    return isinstance(module, _FAST_PATHS) and not module.training


def _has_compiled() -> bool:
    """Return whether ``torch.compile`` has compiled code in this process, without importing its compiler."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and any(code() is not None for code in dynamo.input_codes.seen)
