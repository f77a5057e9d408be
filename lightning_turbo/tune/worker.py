"""One run of a script in its own process, with some settings, for some steps of ``fit``."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from lightning_turbo.doctor.script import Ending, run_program
from lightning_turbo.measure import RoundTimer, SkippedError, open_channel, serve

if TYPE_CHECKING:
    from lightning_turbo.tune.probe import Probe

__all__ = ["main", "measure_program"]

Find: TypeAlias = Callable[[], Mapping[str, Any]]
"""Returns the results, or raises an exception that says why there are none."""
SEED = 0
LINE = 160  # characters of a message
# torch modules whose errors mean that a network cannot be compiled.
TRACERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch.fx")


def measure_program(task: Mapping[str, Any], timer: RoundTimer, report: Callable[[Find], object]) -> None:
    """Run the script or module of a task with a probe in each Trainer, and measure the first ``fit``.

    Args:
        task: What ``ScriptRunner`` sends.
        timer: The timer whose ``step`` the probe calls.
        report: Called once with a function that returns the numbers, or raises an exception that says why there are
            none. A probe that is done then ends this process, without running the program's handlers.
    """
    made: list[Probe] = []

    def callbacks() -> list[Any]:
        from lightning_turbo.tune import probe  # imported late, after the script has chosen its copy of Lightning

        made.append(probe.LookingProbe(timer, task) if task["look"] else probe.Probe(timer, task))
        with made[-1].failing():
            return made[-1].prepare(probe.trainer_in_construction())

    def end(status: int) -> int:
        report(lambda: _found(made, Ending()))
        return status

    ending = run_program(task["program"], task["arguments"], callbacks, module=task["module"], at_end=end)
    report(lambda: _found(made, ending))


def _found(made: list[Probe], ending: Ending) -> Mapping[str, Any]:
    """Return the results of the first ``fit``, or raise an exception that says why nothing was measured."""
    error = ending.error
    for probe in made:
        if probe.refusal:
            raise SkippedError(probe.refusal)
        error = error or probe.error
    if error is not None:
        raise SkippedError(reason) if (reason := _why_skipped(error, made)) else error
    for probe in made:
        if probe.found is not None:
            return probe.found
    found = "its Trainer ended before the steps that are measured" if made else "it made no Trainer"
    found += f", and ended with exit status {ending.status}: its log says why" if ending.status else ""
    raise SkippedError(f"{found}; expected a script that makes a Trainer and calls fit.")


def _why_skipped(error: BaseException, made: list[Probe]) -> str:
    """Return an explanation of an error that is not the script's own; empty for any other."""
    if muted := next(filter(None, (probe.muted.explain(error) for probe in made)), ""):
        return f"{muted} ({type(error).__name__}: {textwrap.shorten(str(error), LINE, placeholder=' ...')})"
    if any(type(each).__module__.startswith(TRACERS) for each in (error, error.__cause__)):
        return "torch cannot trace this network; the log has its words."
    return "out of memory" if _is_out_of_memory(error) else ""


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's CPU allocator raises a RuntimeError.
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(error)


def main() -> None:
    """Use standard input and output as the channel, and run the program."""
    channel = open_channel()
    task = channel.receive()
    # Two processes of a script that seeds nothing differ in nothing but their settings.
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED)
    timer = RoundTimer(channel.ask, warmup=task["warmup"])
    measure_program(task, timer, lambda find: serve(channel, timer, find))


if __name__ == "__main__":
    main()
