"""One examination of a run: when what is looked at, and what it sums up to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from lightning_turbo._lightning import Callback, LightningModule, loss_scale
from lightning_turbo.doctor import inspection
from lightning_turbo.doctor.calls import CallTable, GradientCalls
from lightning_turbo.doctor.facts import BatchTensor, Facts
from lightning_turbo.doctor.retention import held_graphs, retained
from lightning_turbo.doctor.schedule import Schedule
from lightning_turbo.doctor.source import Sources
from lightning_turbo.doctor.timeline import Recorder, Segment, Timeline, middle_of, phases_of
from lightning_turbo.doctor.watch import Watch
from lightning_turbo.plugins.apex_amp import ApexAMP

__all__ = ["Exam"]

# Strategies whose tensors are plain ones; what others do could change under torch's modes.
_PLAIN = ("SingleDeviceStrategy", "DDPStrategy")
_FAST_PATHS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder, torch.nn.MultiheadAttention)


class Exam:
    """One examination of a run; it owns all that is measured, so that nothing of it outlives the report.

    Args:
        schedule: How many steps to look at.
        trainer: The Trainer, which is about to train.
        module: The LightningModule.
        callbacks: The Trainer's other callbacks.
        on_end: Called between two steps once all steps of the schedule are over.
    """

    def __init__(
        self,
        schedule: Schedule,
        trainer: Any,
        module: LightningModule,
        callbacks: list[Callback],
        on_end: Callable[[], None],
    ) -> None:
        self.schedule, self.trainer, self.module = schedule, trainer, module
        self.on_end = on_end
        self.done = 0
        self.cuda = module.device.type == "cuda"
        parts = [
            module,
            *module.modules(),
            *callbacks,
            *([trainer.datamodule] if trainer.datamodule is not None else []),
        ]
        self.sources = Sources(parts)
        self.callbacks = [each for each in callbacks if self.sources.owns(type(each))]
        self.notes: list[str] = self.sources.unreadable()
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.counts = [_steps_of(each) for each in schedulers]
        self.first_step = trainer.global_step
        table = CallTable(trainer.optimizers, schedulers, module.automatic_optimization)
        self.watch = Watch(self.sources, table, cuda=self.cuda)
        if not self.watch.traced:
            self.notes.append("another profile function is set: calls such as self.log(prog_bar=True) were not watched")
        self.timeline = Timeline(self.cuda)
        self.batch: tuple[BatchTensor, ...] = ()
        self.shapes: list[Any] = []
        self.used: set[int] = set()
        self.stepped = self.begun = False
        self.held: list[dict[tuple[str, str], int]] = []
        self.memory: list[int] = []
        self.faults: list[int] = []
        self.scales: list[float] = []
        self.anomaly = self.autograd_profiler = self.validation_graph = False
        self.validation_gradients = GradientCalls()
        self.profiler = trainer.profiler
        self.recorder = Recorder(trainer.profiler, self._boundary, self._fetched, self.watch.pause)
        trainer.profiler = self.recorder

    def _may_look_inside(self) -> bool:
        """Whether nothing in the run would behave otherwise under torch's modes; if not, note why."""
        strategy = type(self.trainer.strategy)
        modules = list(self.module.modules())
        if any(map(_is_compiled, modules)):
            why = "the model is compiled"
        elif _holds_compiled_code():
            why = "torch.compile has compiled code in this process, until torch._dynamo.reset() drops it"
        elif not any(base.__name__ in _PLAIN for base in strategy.__mro__):
            why = f"{strategy.__name__} may hold tensors that are no plain ones"
        elif any(isinstance(each, _FAST_PATHS) and not each.training for each in modules):
            why = "attention layers in eval mode have a fast path that watching would close"
        else:
            return True
        self.notes.append(f"{why}: the run was timed, and not watched from inside")
        return False

    def _boundary(self) -> None:
        """Between two steps: close one, and see what the next one is for."""
        watch = self.watch
        watch.pause()
        seen = self._seen()
        if self.cuda and self.done >= self.schedule.warmup:
            self.memory.append(torch.cuda.memory_allocated(self.module.device))
        if self.done >= self.schedule.warmup and seen <= 0:
            self.faults.append(inspection.page_faults())
        if seen > watch.watched:
            watch.end_step()
            self.held.append(held_graphs(self.module, self.callbacks))
        if seen >= 0:
            self.recorder.timeline = None
        elif self.done >= self.schedule.warmup:
            self.recorder.timeline = self.timeline
        if seen >= self.schedule.watched:
            self.on_end()

    def _seen(self) -> int:
        """Steps since the last timed one; below zero before that."""
        return self.done - self.schedule.warmup - self.schedule.timed

    def _fetched(self) -> None:
        """A batch has been fetched: if its step is to be watched, begin."""
        if self._seen() == 0 and not self.begun:
            self.begun = True
            self.watch.inside = self._may_look_inside()
        if 0 <= self._seen() < self.schedule.watched:
            scale = loss_scale(self.trainer)
            if scale is not None:
                self.scales.append(scale)
            self.anomaly = torch.is_anomaly_enabled()
            self.autograd_profiler = torch.autograd._profiler_enabled()
            self.watch.resume()

    def look_at(self, batch: Any) -> None:
        """Note the batch's shapes and, once, its tensors."""
        if self.done == 0:
            self.batch = inspection.batch_tensors(batch)
        if len(self.shapes) < 32:
            self.shapes.append(inspection.shapes_of(batch))

    def look_at_gradients(self) -> None:
        """Note which parameters have a gradient."""
        self.stepped = True
        self.used.update(id(each) for each in self.module.parameters() if each.grad is not None)

    def look_at_validation(self, outputs: Any) -> None:
        """Note whether what validation returned has a graph, if it was listened whether that serves gradients."""
        if not self.validation_gradients.stop():
            return
        values = outputs.values() if isinstance(outputs, dict) else [outputs]
        self.validation_graph |= any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in values)

    def stop(self) -> None:
        """Stop watching and put the Trainer's profiler back."""
        self.watch.pause()
        self.validation_gradients.stop()
        if self._seen() > self.watch.watched:
            self.watch.end_step()
            self.held.append(held_graphs(self.module, self.callbacks))
        if self.trainer.profiler is self.recorder:
            self.trainer.profiler = self.profiler
        self.recorder.forget()

    def shortfall(self, interrupted: str = "") -> str:
        """Say what is missing if the run was shorter than the schedule, else nothing.

        Args:
            interrupted: The name of the exception that ended the run, if one did.
        """
        needed = self.schedule.steps
        if self.done >= needed:
            return ""
        end = f"was ended by {interrupted}" if interrupted else "ended"
        return (
            f"The run {end} after {self.done} of the {needed} steps that the doctor needs: {len(self.timeline.steps)} "
            f"were timed and {self.watch.watched} watched, so findings may be missing. "
            "Train longer, or use Doctor(warmup=1, timed=1, watched=2)."
        )

    def facts(self) -> tuple[Facts, list[Segment]]:
        """Return all that was measured, and the time line of the step of median length."""
        steps = self.timeline.segments()
        faults = [later - sooner for sooner, later in pairwise(self.faults)]
        trainer, module, watch, sources = self.trainer, self.module, self.watch, self.sources
        batches = trainer.num_training_batches
        count = int(batches) if batches != float("inf") else None
        configs = trainer.lr_scheduler_configs
        taken = [_steps_of(each.scheduler) - before for each, before in zip(configs, self.counts, strict=True)]
        stepped = trainer.global_step - self.first_step
        schedulers = inspection.schedulers(trainer, sources, count, taken, self.done, stepped)
        falls = sum(after < before for before, after in zip(self.scales, self.scales[1:], strict=False))
        moving = any(each.interval == "step" for each in schedulers)
        precision = str(trainer.precision)
        follows = isinstance(trainer.precision_plugin, ApexAMP)  # its schedules wait for the steps that are taken
        sites = inspection.settings(sources)
        validation = sources.call(type(module), "validation_step", "enable_grad", "set_grad_enabled")
        if validation is not None:
            sites["validation"] = validation
        facts = Facts(
            device=str(module.device),
            capability=torch.cuda.get_device_capability(module.device) if self.cuda else None,
            cores=inspection.cores(),
            world_size=trainer.world_size,
            automatic=module.automatic_optimization,
            timed=len(steps),
            watched=watch.watched,
            phases=phases_of(steps),
            page_faults=int(median(faults)) if faults else 0,
            spare_huge_pages=inspection.spare_huge_pages(),
            calls=watch.calls() + inspection.biases(watch, module, sources),
            operations=watch.operations,
            casts=watch.casts,
            elements=watch.elements,
            retained=retained(self.held, module, self.callbacks, sources),
            memory=tuple(self.memory),
            anomaly=self.anomaly,
            profiler=None if type(self.profiler).__name__ == "PassThroughProfiler" else type(self.profiler).__name__,
            autograd_profiler=self.autograd_profiler,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            benchmark=torch.backends.cudnn.benchmark,
            convolutions=inspection.convolves(module),
            shapes=len(set(self.shapes)),
            seen=len(self.shapes),
            precision=precision,
            autocast="mixed" in precision,
            matmul_precision=_matmul_precision(),
            layers=inspection.layers(module, sources) if self.cuda else (),
            scales=tuple(self.scales),
            scheduled_skips=falls if moving and not follows else 0,
            loader=inspection.loader(trainer, sources),
            batch=self.batch,
            epochs=inspection.epochs(trainer, count),
            optimizers=inspection.optimizers(trainer, sources),
            unused=inspection.unused(trainer, self.used, sources) if self.stepped and watch.watched else (),
            accumulate=trainer.accumulate_grad_batches,
            batches=count,
            exact_windows=any(type(each).__name__ == "ExactAccumulation" for each in trainer.callbacks),
            data_parallel=inspection.data_parallel(module, sources),
            validates=bool(trainer.val_dataloaders),
            inference_mode=trainer.validate_loop.inference_mode,
            validation_graph=self.validation_graph,
            validation_gradients=self.validation_gradients.heard,
            schedulers=schedulers,
            sites=sites,
            notes=tuple(self.notes),
        )
        return facts, middle_of(steps)


def _matmul_precision() -> str:
    """How float32 matrix products run on CUDA; torch's older interface refuses to say where the newer one was used."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # from torch 2.9 on
    if newer is None:
        return torch.get_float32_matmul_precision()
    return "high" if newer == "tf32" else "highest"


def _steps_of(scheduler: Any) -> int:
    """The steps that a scheduler has taken; one that does not tell counts as still."""
    return getattr(scheduler, "last_epoch", 0)


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module came out of ``torch.compile``, or was compiled by its own ``compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _holds_compiled_code() -> bool:
    """Whether this process holds code that ``torch.compile`` has looked at; its compiler is not imported for it."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and any(code() is not None for code in dynamo.input_codes.seen)
