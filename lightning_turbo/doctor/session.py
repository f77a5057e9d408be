"""The measurement of one fit: what listens to its timeline, and the facts that come of it."""

from __future__ import annotations

import inspect
import sys
import time
from types import FrameType
from typing import Any

import torch

from lightning_turbo._replaced import ReplacedMethod
from lightning_turbo.doctor import collect
from lightning_turbo.doctor.facts import Facts, LineTime, Seen, Site
from lightning_turbo.doctor.fit import fit_facts
from lightning_turbo.doctor.guard import Guard
from lightning_turbo.doctor.lines import lines_of, logging_of, worker_lines
from lightning_turbo.doctor.loaders import Draws
from lightning_turbo.doctor.retention import Retention
from lightning_turbo.doctor.samples import Sampler, WorkerSamples
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.timeline import (
    Listener,
    Plan,
    Timeline,
    hooks_of,
    phases_of,
    steps_of,
)
from lightning_turbo.doctor.watch import StepWatch

__all__ = ["Session"]

# Strategies with plain tensors; with others, a function mode might change something.
_PLAIN = {"SingleDeviceStrategy", "DDPStrategy"}
_FAST_PATHS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)
ANOMALY = "(set_)?detect_anomaly"
VALIDATED = 2
"""Batches of validation that are watched."""


class Session(Listener):
    """The measurement of one fit: it owns the timeline and everything that looks at the run, until ``stop``.

    The ``Doctor`` creates it when fit sets up; ``stop`` ends it with the report or on an exception. Each fact is
    measured by exactly one part.

    Args:
        plan: The steps that pass, are timed and are watched.
        trainer: The Trainer, whose fit begins.
        guard: Keeps errors of the Doctor away from the run.
        frame: The caller's frame, on whose stack the script's call of ``fit`` is found.
        ending: Told what the timeline tells, after this session.
    """

    def __init__(self, plan: Plan, trainer: Any, guard: Guard, frame: FrameType, ending: Listener) -> None:
        self.trainer = trainer
        module, cuda = trainer.lightning_module, trainer.strategy.root_device.type == "cuda"
        self.fetches = "dataloader_iter" in inspect.signature(module.training_step).parameters
        self.plan = Plan(plan.warmup, plan.timed, 0) if self.fetches else plan
        mine = [each for each in trainer.callbacks if not type(each).__module__.startswith("lightning_turbo.doctor.")]
        own = [each for each in mine if not type(each).__module__.startswith(("lightning.", "pytorch_lightning."))]
        self.sources = Sources([module, trainer.datamodule, *own])
        base = self.sources.caller(frame)
        self.fit = self.sources.site(base)
        self.timeline = Timeline(guard, self, self.plan, cuda)
        self.sampler = Sampler(self.sources.adopted, base, lambda: len(self.timeline.marks) - 1)
        self.workers = WorkerSamples(self.sources.adopted)
        self.watch = StepWatch(self.sources, guard, cuda=cuda, why_not=self._why_not_inside)
        self.retention = Retention(module, [each for each in own if self.sources.owns(type(each))])
        self.draws = Draws()
        self.batch: collect.BatchFacts | None = None
        self.notes: tuple[str, ...] = ()
        self._ending = ending
        self._loads: ReplacedMethod | None = None
        self._usage: list[tuple[float, float]] = []  # time and CPU time as the timed steps begin and end
        self._is_over = False

    def begin(self) -> None:
        """Start."""
        self._loads = ReplacedMethod(self.trainer.strategy, "process_dataloader", self._process)
        self.timeline.begin(self.trainer)

    def _process(self, process: Any, dataloader: Any) -> Any:
        loader = process(dataloader)
        self.workers.watch(loader)
        return loader

    def stop(self) -> None:
        """Stop: nothing of it is left in the Trainer and in this process."""
        self._is_over = True
        self.sampler.stop()
        self.watch.pause()
        self.draws.drop()
        self.timeline.stop()
        if self._loads is not None:
            self._loads.put_back()

    def close(self) -> None:
        """End the samples of worker processes, whose results were read."""
        self.workers.stop()

    # What the timeline tells

    def begin_step(self, step: int) -> None:
        """Look at what loading draws, in a watched step, and let the ending decide first."""
        if step in (self.plan.warmup, self.plan.warmup + self.plan.timed):
            self._usage.append((time.perf_counter(), time.process_time()))
        self._ending.begin_step(step)
        if self.plan.watches(step) and not self._is_over:
            self.sampler.pause()
            self.draws.begin(self.trainer.train_dataloader)

    def fetched(self, step: int) -> None:
        """Watch the step, if it is to be watched."""
        self.draws.fetched()
        if self.plan.watches(step) and not self._is_over:
            self.watch.begin_step()
        self._ending.fetched(step)

    def end_step(self, step: int) -> None:
        """Stop watching, and look at what the step leaves behind."""
        self.draws.end()
        if self.plan.watches(step):
            self.watch.end_step()
            self.retention.measure()
            self.sampler.resume()
        self._ending.end_step(step)

    def drop_step(self, step: int) -> None:
        """Stop watching what was no step."""
        self.draws.drop()
        self.watch.pause()
        self.sampler.resume()

    def begin_hook(self, hook: str) -> None:
        """Start to sample, and watch the first batches of validation."""
        # After the run Lightning restores all signal handlers that it found before these hooks.
        if hook in ("on_sanity_check_start", "on_train_start") and not self.sampler.is_started:
            self.sampler.start()
        self._ending.begin_hook(hook)
        is_watched = self.timeline.epochs and self.watch.validated < VALIDATED and self.plan.watched
        if hook == "validation_step" and is_watched and not self._is_over:
            self.watch.begin_validation()

    def end_hook(self, hook: str) -> None:
        """Stop watching a batch of validation."""
        if hook == "validation_step":
            self.watch.end_validation()

    def end_training(self) -> None:
        """Training is over."""
        self._ending.end_training()

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

    # Facts

    def shortfall(self, why: str = "") -> str:
        """Say what is missing if the run was too short; empty if nothing is.

        Args:
            why: What ended the look at the run, such as the name of an exception; empty if the run ended.
        """
        plan, steps = self.plan, self.timeline.step
        if steps >= plan.needed:
            return ""
        timed = max(0, min(steps - plan.warmup, plan.timed))
        end = f"was ended by {why}" if why else "ended"
        return (
            f"The run {end} after {steps} of the {plan.needed} steps that the doctor needs: {timed} were "
            f"timed and {self.watch.watched} watched, so findings may be missing. "
            "Train longer, or use Doctor(warmup=1, timed=1, watched=2)."
        )

    def step_seconds(self) -> float:
        """Return the seconds of a mean timed step so far, by the host's clock; 0 without one."""
        marks = [each for each in self.timeline.marks if self.plan.times(each.step)]
        count = len({each.step for each in marks})
        return (marks[-1].time - marks[0].time) / count if count else 0.0

    def facts(self) -> Facts:
        """Return everything that was measured."""
        trainer, module, sources = self.trainer, self.trainer.lightning_module, self.sources
        marks = self.timeline.marks
        if self.timeline.is_open:  # the open step is not complete
            marks = [each if each.step < self.timeline.step else each._replace(step=-1) for each in marks]
        if any(each.event is not None for each in marks):
            torch.cuda.synchronize()
        steps = steps_of(marks, self.plan.times)
        counts = [step for step in {each.step for each in marks} - {-1} if self.plan.samples(step)]
        logging = logging_of(self.sampler.seconds, marks, self.plan.samples)
        phases = _move(phases_of(steps), logging)
        batch = self.batch or collect.BatchFacts()
        loader = collect.loader_facts(trainer, sources, self.draws, self.fit)
        seconds = sum(phases.values())
        lines = self._lines(marks, len(counts), phases.get("data", 0.0))
        return Facts(
            run=collect.run_facts(trainer),
            seen=Seen(
                watched=self.watch.watched,
                calls=self.watch.calls(),
                retained=self.retention.find(sources),
                anomaly=self.watch.anomaly,
                anomaly_site=sources.setting(ANOMALY, self.fit) if self.watch.anomaly else None,
                biases=collect.cancelled_biases(module, self.watch.biases, sources),
            ),
            timed=len(steps),
            steps=tuple(sum(step.values()) for step in steps),
            phases=phases,
            typical=_move(phases_of(steps, typical=True), logging),
            loader=loader,
            validation_loader=collect.validation_loader_facts(trainer, sources, self.fit),
            fit=fit_facts(self.timeline, marks, steps, seconds, lines, self._site_of_hook),
            training_step=sources.method(module, "training_step"),
            validation_step=sources.method(module, "validation_step"),
            batch=batch.size,
            objects=batch.objects,
            wide=batch.wide,
            convolutions=collect.has_contiguous_convolutions(module),
            optimizers=collect.optimizer_facts(trainer, sources),
            schedulers=collect.scheduler_facts(trainer, sources),
            lines=lines,
            notes=self._all_notes(),
            cores_used=_cores_used(self._usage),
        )

    def _lines(self, marks: Any, steps: int, waiting: float) -> tuple[LineTime, ...]:
        watch = self.watch
        parts = {"steps": watch.watched, "validation": watch.validated}
        batches = {"steps": 1, "validation": sum(each.validated for each in self.timeline.epochs)}
        torch_seconds = {
            part: {key: seconds * batches[part] / parts[part] for key, seconds in watch.computed[part].items()}
            for part in parts
            if parts[part]
        }
        sampler = self.sampler
        found = lines_of(sampler.seconds, sampler.computing, marks, self.plan.samples, steps, torch_seconds)
        fetches = hooks_of(marks, "validation start", "validation")
        validating = sum(seconds for (_, hook), seconds in fetches.items() if hook.endswith("val_next"))
        loop = self.trainer.fit_loop
        more: list[LineTime] = []
        for part, combined, seconds in (
            ("steps", loop._combined_loader, waiting),
            ("validation", loop.epoch_loop.val_loop._combined_loader, validating),
        ):
            for loader in [] if combined is None else combined.flattened:
                more += worker_lines(self.workers.read(loader), part, seconds)
        return tuple(sorted((*found, *more), key=lambda each: -each.seconds))

    def _all_notes(self) -> tuple[str, ...]:
        notes = list(self.notes)
        if self.watch.table is None:
            notes.append("another profile function is set: calls such as self.log(prog_bar=True) were not watched")
        if self.sampler.by_thread:
            notes.append("lines were sampled by a thread, as the timer is taken: short loops in Python may be missed")
        if self.sampler.lost:
            notes.append("the program has set SIGALRM meanwhile, or a stack could not be read: lines may be missing")
        reason = "training_step(dataloader_iter) fetches its batches itself" if self.fetches else self.watch.reason
        if reason:
            notes.append(f"{reason}: the run was timed and its lines sampled, and not watched from inside")
        return tuple(notes)

    def _site_of_hook(self, hook: str) -> Site | None:
        """Return the line of a hook of the LightningModule, the DataModule or a callback."""
        owner, _, name = hook.rpartition(".")
        trainer = self.trainer
        names = {f"[LightningModule]{type(trainer.lightning_module).__name__}": trainer.lightning_module}
        names |= {f"[LightningDataModule]{type(trainer.datamodule).__name__}": trainer.datamodule}
        names |= {f"[Callback]{each.state_key}": each for each in trainer.callbacks}
        return self.sources.method(names[owner], name) if owner in names else None


def _cores_used(usage: list[tuple[float, float]]) -> float:
    """Return the CPU seconds of this process per second of the timed steps; 0 if they did not end."""
    if len(usage) < 2:
        return 0.0
    (begun, busy), (ended, later) = usage
    return (later - busy) / (ended - begun)


def _move(phases: dict[str, float], logging: dict[str, float]) -> dict[str, float]:
    """Return the phases of a step where ``self.log`` is logging, in whatever phase it is called."""
    moved = {phase: phases.get(phase, 0.0) * share for phase, share in logging.items() if phase != "logging"}
    rest = {phase: seconds - moved.get(phase, 0.0) for phase, seconds in phases.items()}
    return {**rest, "logging": rest["logging"] + sum(moved.values())} if rest else {}


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
