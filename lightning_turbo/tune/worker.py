"""One run of a script: in a process of its own, with some settings, for some steps of ``fit`` and no further."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_turbo.doctor.script import Ending, run_program
from lightning_turbo.measure import Meter, SkippedError, open_channel, serve

if TYPE_CHECKING:
    from lightning_turbo.tune.probe import Probe

__all__ = ["main", "measure_program"]

# Modules of torch whose errors say that a network cannot be compiled.
TRACERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch.fx")


def measure_program(task: Mapping[str, Any], meter: Meter) -> Mapping[str, Any]:
    """Run the script or the module that a task names, with a probe in each Trainer; the first ``fit`` is measured."""
    made: list[Probe] = []

    def callbacks() -> list[Any]:
        from lightning_turbo.tune import probe  # not before the script has chosen its copy of Lightning

        kind = probe.WholeEpoch if task["mode"] == "epoch" else probe.Probe
        made.append(kind(meter, task["mode"]))
        return [*probe.prepare_trainer(probe.trainer_in_construction(), task["settings"], made[-1]), made[-1]]

    _check(run_program(task["program"], task["arguments"], callbacks, module=task["module"]), made, meter)
    used = next(each for each in made if each.facts)
    return {"facts": used.facts, "losses": [loss.item() for loss in used.losses], **used.numbers}


def _check(ending: Ending, made: list[Probe], meter: Meter) -> None:
    """Say why nothing was measured."""
    for probe in made:
        if probe.refusal:
            raise SkippedError(probe.refusal)
    if ending.error is not None:
        if any(type(each).__module__.startswith(TRACERS) for each in (ending.error, ending.error.__cause__)):
            raise SkippedError("torch cannot trace this network; the log has its words.")
        raise ending.error
    if not meter.over:
        found = "its Trainer ended before the steps that are measured" if made else "it made no Trainer"
        raise SkippedError(f"{found}; expected a script that makes a Trainer and calls fit.")


def main() -> None:
    """Take over standard input and output, and run the program."""
    channel = open_channel()
    task = channel.receive()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(task["seed"])
    meter = Meter(channel.ask, warmup=task["warmup"])
    serve(channel, meter, lambda: measure_program(task, meter))


if __name__ == "__main__":
    main()
