"""One session of the doctor with a run: when what is looked at, and what it sums up to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from lightning_turbo._lightning import Callback, LightningModule, loss_scale
from lightning_turbo.doctor import collect
from lightning_turbo.doctor.facts import BatchTensor, Facts
from lightning_turbo.doctor.retention import find_retained, measure_graphs
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.timeline import Recorder, Segment, Timeline, sum_phases
from lightning_turbo.doctor.watch import Watch

__all__ = ["Session"]

# Strategies whose tensors are plain ones; what others do could change under torch's modes.
_PLAIN = ("SingleDeviceStrategy", "DDPStrategy")
_FAST_PATHS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)


class Session:
    """One session with a run; it owns all that is measured, so that nothing of it outlives the report.

    Args:
        warmup: Steps before the first look.
        timed: Steps that are timed.
        watched: Steps that are watched from inside.
        trainer: The Trainer, which is about to train.
        module: The LightningModule.
        callbacks: The Trainer's other callbacks.
        on_end: Called between two steps once all these steps are over.
    """

    def __init__(
        self, warmup: int, timed: int, watched: int, trainer: Any, module: LightningModule, callbacks: list[Callback],
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self.warmup, self.timed, self.to_watch = warmup, timed, watched
        self.trainer, self.module, self.on_end = trainer, module, on_end
        self.done = 0
        self.cuda = module.device.type == "cuda"
        own = [each for each in callbacks if not type(each).__module__.startswith(("lightning.", "pytorch_lightning."))]
        data = [trainer.datamodule] if trainer.datamodule is not None else []
        self.sources = Sources([module, *data, *own], module.modules())
        self.callbacks = [each for each in own if self.sources.owns(type(each))]
        self.notes: list[str] = []
        if self.sources.owns(type(module)) and not self.sources.is_readable(type(module)):
            self.notes.append(f"the code of {type(module).__name__} is in no file that can be read, so that findings "
                              "there have no line: put it in a file")  # fmt: skip
        self.watch = Watch(self.sources, cuda=self.cuda)
        if not self.watch.traced:
            self.notes.append("another profile function is set: calls such as self.log(prog_bar=True) were not watched")
        self.timeline = Timeline(self.cuda)
        self.batch: tuple[BatchTensor, ...] = ()
        self.shapes: list[Any] = []
        self.used: set[int] = set()
        self.versions: dict[int, int] = {}
        self.stepped = self.begun = self.anomaly = self.autograd_profiler = self.validation_graph = False
        self.held: list[dict[tuple[str, str], int]] = []
        self.memory: list[int] = []
        self.scales: list[float] = []
        self.compiled = [collect.compiler_counts()]
        self.profiler = trainer.profiler
        self.recorder = Recorder(trainer.profiler, self.timeline, self._between, self._fetched, self.watch.pause)
        trainer.profiler = self.recorder

    def _check_inside(self) -> bool:
        """Whether nothing in the run would behave otherwise under torch's modes; if not, note why."""
        strategy, modules = type(self.trainer.strategy), list(self.module.modules())
        reasons = {
            "the model is compiled": any(map(_is_compiled, modules)),
            "torch.compile has compiled code in this process, until torch._dynamo.reset() drops it": _has_compiled(),
            f"{strategy.__name__} may hold tensors that are no plain ones": not any(
                base.__name__ in _PLAIN for base in strategy.__mro__
            ),
            "attention layers in eval mode have a fast path that watching would close": any(
                isinstance(each, _FAST_PATHS) and not each.training for each in modules
            ),
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is not None:
            self.notes.append(f"{why}: the run was timed, and not watched from inside")
        return why is None

    @property
    def _seen(self) -> int:
        """Steps since the last timed one; below zero before that."""
        return self.done - self.warmup - self.timed

    def _between(self) -> None:
        """Between two steps: close one, and see what the next one is for."""
        self.watch.pause()
        if self.done >= self.warmup:
            self._measure_process()
        self._close_step()
        self.timeline.recording = self.done >= self.warmup and self._seen < 0
        if self._seen >= self.to_watch:
            self.on_end()

    def _measure_process(self) -> None:
        if self.cuda:
            self.memory.append(torch.cuda.memory_allocated(self.module.device))
        if len(self.compiled) == 1:
            self.compiled.append(collect.compiler_counts())

    def _close_step(self) -> None:
        if self._seen > self.watch.watched:
            self.watch.end_step()
            self.held.append(measure_graphs(self.module, self.callbacks))

    def _fetched(self) -> None:
        """A batch has been fetched: if its step is to be watched, begin."""
        if not 0 <= self._seen < self.to_watch:
            return
        if not self.begun:
            self.begun = True
            self.watch.inside = self._check_inside()
        scale = loss_scale(self.trainer)
        self.scales += [] if scale is None else [scale]
        self.anomaly = torch.is_anomaly_enabled()
        self.autograd_profiler = torch.autograd._profiler_enabled()
        self.watch.resume()

    def look_at(self, batch: Any) -> None:
        """Note the batch's shapes and, once, its tensors."""
        if self.done == 0:
            self.batch = collect.batch_tensors(batch)
        if len(self.shapes) < 32:
            self.shapes.append(collect.shapes_of(batch))

    def look_at_gradients(self) -> None:
        """Note which parameters have a gradient, or have changed: a callback may train them by itself."""
        self.stepped = True
        for each in self.module.parameters():
            if each.grad is not None or each._version != self.versions.setdefault(id(each), each._version):
                self.used.add(id(each))

    def look_at_validation(self, outputs: Any) -> None:
        """Note whether what validation returned has a graph."""
        values = outputs.values() if isinstance(outputs, dict) else [outputs]
        self.validation_graph |= any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in values)

    def stop(self) -> None:
        """Stop watching and put the Trainer's profiler back."""
        self.watch.pause()
        self._close_step()
        self.compiled.append(collect.compiler_counts())
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
        batches = None if trainer.num_training_batches == float("inf") else int(trainer.num_training_batches)
        before, warm, after = self.compiled[0], self.compiled[1 if len(self.compiled) > 2 else -1], self.compiled[-1]
        profiler, precision = type(self.profiler).__name__, str(trainer.precision)
        facts = Facts(
            world_size=trainer.world_size,
            automatic=module.automatic_optimization,
            timed=len(self.timeline.steps),
            watched=watch.watched,
            phases=sum_phases(segments),
            calls=watch.calls(),
            operations=watch.operations,
            retained=find_retained(self.held, module, self.callbacks, sources),
            memory=tuple(self.memory),
            graph_breaks=dict(after[0] - before[0]),
            recompiled=max(after[1] - warm[1], 0),
            anomaly=self.anomaly,
            profiler=None if profiler == "PassThroughProfiler" else profiler,
            autograd_profiler=self.autograd_profiler,
            shapes=len(set(self.shapes)),
            seen=len(self.shapes),
            precision=precision,
            autocast="mixed" in precision,
            scales=tuple(self.scales),
            loader=collect.loader_facts(trainer, sources),
            batch=self.batch,
            epochs=collect.count_epochs(trainer, batches),
            batches=batches,
            accumulate=trainer.accumulate_grad_batches,
            exact_windows=any(type(each).__name__ == "ExactAccumulation" for each in trainer.callbacks),
            optimizers=collect.optimizer_facts(trainer, sources),
            schedulers=collect.scheduler_facts(trainer, sources, batches),
            unused=collect.unused_parameters(trainer, self.used, sources) if self.stepped and watch.watched else (),
            validates=bool(trainer.val_dataloaders),
            inference_mode=trainer.validate_loop.inference_mode,
            validation_graph=self.validation_graph,
            sites=collect.setting_sites(sources, type(module)),
            notes=tuple(self.notes),
            **collect.process_facts(module.device),
            **collect.model_facts(module, watch.biases, sources),
        )
        return facts, segments


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module came out of ``torch.compile``, or was compiled by its own ``compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _has_compiled() -> bool:
    """Whether this process holds code that ``torch.compile`` has looked at; its compiler is not imported for it."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and any(code() is not None for code in dynamo.input_codes.seen)
