"""One session of the doctor with a run: when what is looked at, and what it sums up to."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from lightning_turbo._lightning import Callback
from lightning_turbo.doctor import collect
from lightning_turbo.doctor.facts import BOUNDS, Facts, Rank, Seen
from lightning_turbo.doctor.graph import GraphCheck
from lightning_turbo.doctor.ranks import rank_facts
from lightning_turbo.doctor.reads import Reads
from lightning_turbo.doctor.retention import Retention
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.timeline import Recorder, Segment, Timeline, longest_action, sum_phases
from lightning_turbo.doctor.watch import Watch
from lightning_turbo.nn.compile import compile_counts

__all__ = ["Session"]

# Strategies whose tensors are plain ones; what others do could change under a function mode.
_PLAIN = {"SingleDeviceStrategy", "DDPStrategy"}
_FAST_PATHS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)


@dataclass(slots=True)
class Plan:
    """How many steps are let pass, timed and watched, and how many are over."""

    warmup: int
    timed: int
    to_watch: int
    done: int = 0

    @property
    def needed(self) -> int:
        """Steps until the report."""
        return self.warmup + self.timed + self.to_watch

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.done >= self.warmup

    @property
    def watched(self) -> int:
        """Steps since the last timed one; below zero before that."""
        return self.done - self.warmup - self.timed

    @property
    def timing(self) -> bool:
        """Whether the next step is one of those to time."""
        return self.warm and self.watched < 0

    @property
    def watching(self) -> bool:
        """Whether the next step is one of those to watch."""
        return 0 <= self.watched < self.to_watch


class Session:
    """One session with a run; it owns all that is measured, so that nothing of it outlives the report.

    It begins with the run: the recorder takes the place of the Trainer's profiler and calls ``_between`` and
    ``_fetched`` in every step. ``stop`` ends it and puts the profiler back, after the last step or an exception.

    Args:
        steps: The steps before the first look, those that are timed, and those that are watched from inside.
        trainer: The Trainer, which is about to train.
        callbacks: The Trainer's other callbacks.
        frame: The caller's frame, on whose stack the script's call of ``fit`` is found.
        on_end: Called between two steps once all these steps are over.
    """

    def __init__(
        self, steps: tuple[int, int, int], trainer: Any, callbacks: list[Callback], frame: FrameType,
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self.trainer, self.on_end = trainer, on_end
        module, cuda = trainer.lightning_module, trainer.lightning_module.device.type == "cuda"
        fetches = "dataloader_iter" in inspect.signature(module.training_step).parameters
        self.plan = Plan(*steps[:2], 0 if fetches else steps[2])
        own = [each for each in callbacks if not type(each).__module__.startswith(("lightning.", "pytorch_lightning."))]
        self.sources = Sources([module, trainer.datamodule, *own])
        self.fit = self.sources.site(frame, through=True)
        self.graph = GraphCheck(trainer, self.sources)
        self.watch = Watch(self.sources, cuda=cuda, before=self._note_call)
        self.retention = Retention(module, [each for each in own if self.sources.owns(type(each))])
        # Counted at three moments: what the warm-up compiles does not count as compiled again.
        self.compiled = [compile_counts()]
        told = "another profile function is set: calls such as self.log(prog_bar=True) were not watched"
        # Fields of ``Facts`` and ``Seen``.
        self.noted: dict[str, Any] = {"notes": () if self.watch.table is not None else (told,)}
        if fetches:
            self._note_timed_only("training_step(dataloader_iter) fetches its batches itself")
        timeline = Timeline(cuda)
        self.recorder = Recorder(trainer.profiler, timeline, self._between, self._fetched, self._pause)
        self.reads = Reads()
        trainer.profiler = self.recorder

    def _check_inside(self) -> bool:
        """Return whether nothing in the run would behave otherwise under a function mode; if not, note why."""
        strategy, modules = type(self.trainer.strategy), list(self.trainer.lightning_module.modules())
        if any(map(_is_compiled, modules)):
            reason = "the model is compiled"
        elif _has_compiled():
            reason = "torch.compile has compiled code in this process, until torch._dynamo.reset() drops it"
        elif _base_of(strategy) not in _PLAIN:
            reason = f"{strategy.__name__} may split tensors over devices"
        elif any(map(_is_fast, modules)):
            reason = "attention layers in eval mode have a fast path that watching would close"
        else:
            return True
        self._note_timed_only(reason)
        return False

    def _note_timed_only(self, reason: str) -> None:
        self.noted["notes"] = (*self.noted["notes"], f"{reason}: the run was timed, and not watched from inside")

    def _note_call(self, *call: Any) -> None:
        if self.recorder.phase == "forward":
            self.graph.call(*call)

    def _pause(self) -> None:
        """Something begins that is no part of a step."""
        self.watch.pause()
        self.reads.drop()

    def _between(self) -> None:
        """Between two steps: close one, and see what the next one is for."""
        # First of all, so that the Doctor's own work between two steps is neither watched nor read as loading.
        self.watch.pause()
        self.reads.end()
        if self.plan.timing:
            self.reads.begin()
        if self.plan.warm and len(self.compiled) == 1:
            self.compiled.append(compile_counts())
        self._close_step()
        self.recorder.timeline.recording = self.plan.timing
        if self.plan.done >= self.plan.needed:
            self.on_end()

    def _close_step(self) -> None:
        if self.plan.watched > self.watch.watched:
            self.watch.end_step()
            self.retention.measure()

    def _fetched(self) -> None:
        """A batch has been fetched: if its step is to be watched, begin."""
        if not self.plan.watching:
            return
        if self.plan.watched == 0:
            self.watch.inside = self._check_inside()
        self.noted["anomaly"] = torch.is_anomaly_enabled()
        self.graph.begin_step()
        self.watch.resume()

    def look_at(self, batch: Any) -> None:
        """Note what the first batch holds, and the shapes of all."""
        self.graph.look_at(batch)
        # There is none yet where ``training_step`` fetches it.
        if "batch" not in self.noted and batch is not None:
            self.noted |= collect.batch_facts(batch)

    def stop(self) -> None:
        """Stop watching and put the Trainer's profiler back."""
        self.watch.pause()
        self._close_step()
        self.compiled.append(compile_counts())
        if self.trainer.profiler is self.recorder:
            self.trainer.profiler = self.recorder.inner

    def shortfall(self, interrupted: str = "") -> str:
        """Say what is missing if the run was too short, else nothing.

        Args:
            interrupted: The name of the exception that ended the run, if one did.
        """
        plan, timed = self.plan, len(self.recorder.timeline.steps)
        if plan.done >= plan.needed:
            return ""
        end = f"was ended by {interrupted}" if interrupted else "ended"
        return (
            f"The run {end} after {plan.done} of the {plan.needed} steps that the doctor needs: {timed} were timed and "
            f"{self.watch.watched} watched, so findings may be missing. "
            "Train longer, or use Doctor(warmup=1, timed=1, watched=2)."
        )

    def rank(self, outside: dict[str, float]) -> Rank:
        """Return what this rank of several took its time for, with its seconds outside of the steps."""
        loader = collect.loader_facts(self.trainer, self.sources, self.fit).site
        owners = [self.trainer.lightning_module, self.trainer.datamodule, *self.trainer.callbacks]
        facts = rank_facts(self.recorder.timeline, outside, owners, self.sources, loader)
        facts.sites["before fit"] = self.fit
        return facts

    def facts(self, ranks: tuple[Rank, ...] = ()) -> tuple[Facts, list[Segment]]:
        """Return all that was measured, with what all ``ranks`` were, and the mean step."""
        trainer, module, watch, sources = self.trainer, self.trainer.lightning_module, self.watch, self.sources
        segments = self.recorder.timeline.mean_step()
        before, warm, after = self.compiled[0], self.compiled[-2], self.compiled[-1]
        warmed = len(self.compiled) > 2  # a run that ended in its warmup compiled for the first time
        noted = dict(self.noted)
        seen = Seen(
            watched=watch.watched,
            calls=watch.calls(),
            retained=self.retention.find(sources),
            anomaly=noted.pop("anomaly", False),
            graph_breaks=after.since(before).breaks,
            recompilations=after.since(warm).recompilations if warmed else {},
            graph=self.graph.find() if watch.watched else (),
        )
        facts = Facts(
            run=collect.run_facts(trainer),
            seen=seen,
            timed=len(self.recorder.timeline.steps),
            steps=tuple(sum(step.values()) for step in self.recorder.timeline.each_step()),
            phases=sum_phases(segments),
            read=sum(self.reads.steps) / max(len(self.reads.steps), 1),
            indexed_gzip="indexed_gzip" in sys.modules,
            longest_hook=longest_action(segments, BOUNDS["loop"]),
            loader=collect.loader_facts(trainer, sources, self.fit),
            convolutions=collect.has_contiguous_convolutions(module),
            optimizers=collect.optimizer_facts(trainer, sources),
            schedulers=collect.scheduler_facts(trainer, sources),
            ranks=ranks,
            **noted,
        )
        return facts, segments


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module came out of ``torch.compile``, or was compiled by its own ``compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _base_of(strategy: type) -> str:
    """Return the nearest of Lightning's own strategies: DeepSpeed's and XLA's are subclasses of DDP's."""
    bases = (base for base in strategy.__mro__ if base.__module__.startswith(("lightning.", "pytorch_lightning.")))
    return next(base.__name__ for base in bases)


def _is_fast(module: torch.nn.Module) -> bool:
    return isinstance(module, _FAST_PATHS) and not module.training


def _has_compiled() -> bool:
    """Return whether this process holds code that ``torch.compile`` has looked at, without importing its compiler."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and any(code() is not None for code in dynamo.input_codes.seen)
