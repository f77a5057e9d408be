"""One session of the doctor with a run: when what is looked at, and what it sums up to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from lightning_turbo._lightning import Callback, LightningModule
from lightning_turbo.doctor import collect
from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.retention import find_retained, measure_graphs
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.timeline import Recorder, Segment, Timeline, sum_phases
from lightning_turbo.doctor.watch import Watch
from lightning_turbo.nn.compile import compile_counts

__all__ = ["Session"]

# Strategies whose tensors are plain ones; what others do could change under a function mode.
_PLAIN = {"SingleDeviceStrategy", "DDPStrategy"}
_FAST_PATHS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)


class Session:
    """One session with a run; it owns all that is measured, so that nothing of it outlives the report.

    Args:
        steps: The steps before the first look, those that are timed, and those that are watched from inside.
        trainer: The Trainer, which is about to train.
        module: The LightningModule.
        callbacks: The Trainer's other callbacks.
        frame: The caller's frame, on whose stack the script's call of ``fit`` is found.
        on_end: Called between two steps once all these steps are over.
    """

    def __init__(
        self, steps: tuple[int, int, int], trainer: Any, module: LightningModule, callbacks: list[Callback],
        frame: FrameType, on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self.warmup, self.timed, self.to_watch = steps
        self.trainer, self.module, self.on_end = trainer, module, on_end
        self.done = 0
        self.cuda = module.device.type == "cuda"
        own = [each for each in callbacks if not type(each).__module__.startswith(("lightning.", "pytorch_lightning."))]
        self.sources = Sources([module, trainer.datamodule, *own])
        self.callbacks = [each for each in own if self.sources.owns(type(each))]
        self.fit = self.sources.site(frame, through=True)
        self.watch = Watch(self.sources, cuda=self.cuda)
        told = "another profile function is set: calls such as self.log(prog_bar=True) were not watched"
        self.notes = [] if self.watch.traced else [told]
        self.timeline = Timeline(self.cuda)
        self.batch: dict[str, Any] = {}
        self.used: set[int] = set()
        self.versions: dict[int, int] = {}
        self.stepped = self.begun = self.anomaly = False
        self.held: list[dict[tuple[str, str], int]] = []
        self.compiled = [compile_counts()]
        self.profiler = trainer.profiler
        self.recorder = Recorder(trainer.profiler, self.timeline, self._between, self._fetched, self.watch.pause)
        trainer.profiler = self.recorder

    def _check_inside(self) -> bool:
        """Return whether nothing in the run would behave otherwise under a function mode; if not, note why."""
        strategy, modules = type(self.trainer.strategy), list(self.module.modules())
        reasons = {
            "the model is compiled": any(map(_is_compiled, modules)),
            "torch.compile has compiled code in this process, until torch._dynamo.reset() drops it": _has_compiled(),
            f"{strategy.__name__} may split tensors over devices": not {base.__name__ for base in strategy.__mro__}
            & _PLAIN,
            "attention layers in eval mode have a fast path that watching would close": any(map(_is_fast, modules)),
        }
        found = [f"{reason}: the run was timed, and not watched from inside" for reason in reasons if reasons[reason]]
        self.notes += found[:1]
        return not found

    @property
    def _seen(self) -> int:
        """Steps since the last timed one; below zero before that."""
        return self.done - self.warmup - self.timed

    def _between(self) -> None:
        """Between two steps: close one, and see what the next one is for."""
        self.watch.pause()
        if self.done >= self.warmup and len(self.compiled) == 1:
            self.compiled.append(compile_counts())
        self._close_step()
        self.timeline.recording = self.done >= self.warmup and self._seen < 0
        if self._seen >= self.to_watch:
            self.on_end()

    def _close_step(self) -> None:
        if self._seen > self.watch.watched:
            self.watch.end_step()
            self.held.append(measure_graphs(self.module, self.callbacks))

    def _fetched(self) -> None:
        """A batch has been fetched: if its step is to be watched, begin."""
        if not 0 <= self._seen < self.to_watch:
            return
        if not self.begun:
            self.begun, self.watch.inside = True, self._check_inside()
        self.anomaly = torch.is_anomaly_enabled()
        self.watch.resume()

    def look_at(self, batch: Any) -> None:
        """Note what the first batch holds."""
        self.batch = self.batch or collect.batch_facts(batch)

    def look_at_gradients(self) -> None:
        """Note which parameters have a gradient, or have changed: a callback may train them by itself."""
        self.stepped = True
        for each in self.module.parameters():
            if each.grad is not None or each._version != self.versions.setdefault(id(each), each._version):
                self.used.add(id(each))

    def stop(self) -> None:
        """Stop watching and put the Trainer's profiler back."""
        self.watch.pause()
        self._close_step()
        self.compiled.append(compile_counts())
        if self.trainer.profiler is self.recorder:
            self.trainer.profiler = self.profiler
        self.recorder.forget()

    def shortfall(self, interrupted: str = "") -> str:
        """Say what is missing if the run was too short, else nothing.

        Args:
            interrupted: The name of the exception that ended the run, if one did.
        """
        needed = self.warmup + self.timed + self.to_watch
        if self.done >= needed:
            return ""
        end = f"was ended by {interrupted}" if interrupted else "ended"
        return (
            f"The run {end} after {self.done} of the {needed} steps that the doctor needs: {len(self.timeline.steps)} "
            f"were timed and {self.watch.watched} watched, so findings may be missing. "
            "Train longer, or use Doctor(warmup=1, timed=1, watched=2)."
        )

    def facts(self) -> tuple[Facts, list[Segment]]:
        """Return all that was measured, and the mean step."""
        trainer, module, watch, sources = self.trainer, self.module, self.watch, self.sources
        segments = self.timeline.mean_step()
        before, warm, after = self.compiled[0], self.compiled[-2], self.compiled[-1]
        warmed = len(self.compiled) > 2  # a run that ended in its warmup compiled for the first time
        # A sample is loaded to learn about its draws only by a doctor that was to watch, and did.
        complete = 0 < self.to_watch == watch.watched
        facts = Facts(
            world_size=trainer.world_size,
            automatic=module.automatic_optimization,
            timed=len(self.timeline.steps),
            watched=watch.watched,
            phases=sum_phases(segments),
            calls=watch.calls(),
            retained=find_retained(self.held, module, self.callbacks, sources),
            graph_breaks=after.since(before).breaks,
            recompilations=after.since(warm).recompilations if warmed else {},
            anomaly=self.anomaly,
            precision=str(trainer.precision),
            loader=collect.loader_facts(trainer, sources, self.fit, probe=complete),
            epochs=collect.count_epochs(trainer),
            batches=trainer.num_training_batches,
            accumulate=trainer.accumulate_grad_batches,
            exact_windows=any(type(each).__name__ == "ExactAccumulation" for each in trainer.callbacks),
            optimizers=collect.optimizer_facts(trainer, sources),
            schedulers=collect.scheduler_facts(trainer, sources),
            unused=collect.unused_parameters(trainer, self.used, sources) if self.stepped and watch.watched else (),
            notes=tuple(self.notes),
            **collect.process_facts(module.device),
            biases=collect.cancelled_biases(module, watch.biases, sources),
            **self.batch,
        )
        return facts, segments


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module came out of ``torch.compile``, or was compiled by its own ``compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _is_fast(module: torch.nn.Module) -> bool:
    return isinstance(module, _FAST_PATHS) and not module.training


def _has_compiled() -> bool:
    """Return whether this process holds code that ``torch.compile`` has looked at, without importing its compiler."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and any(code() is not None for code in dynamo.input_codes.seen)
