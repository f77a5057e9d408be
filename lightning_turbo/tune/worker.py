"""One run of a script: in a process of its own, with some settings, for some steps of ``fit`` and no further."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_turbo.doctor.script import Ending, run_program
from lightning_turbo.measure import Meter, SkippedError, limit_memory, open_channel, serve

if TYPE_CHECKING:
    from lightning_turbo.tune.probe import Probe

__all__ = ["main", "measure_program"]

# Modules of torch whose errors say that a network cannot be compiled.
MARGIN = 0.9  # of the memory that is free
OUT_OF_MEMORY = "out of memory"
TRACERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch.fx")


def measure_program(task: Mapping[str, Any], meter: Meter) -> Mapping[str, Any]:
    """Run the script or the module that a task names, with a probe in each Trainer; the first ``fit`` is measured."""
    made: list[Probe] = []

    def callbacks() -> list[Any]:
        from lightning_turbo.tune import probe  # not before the script has chosen its copy of Lightning

        kind = probe.WholeEpoch if task["mode"] == "epoch" else probe.Probe
        made.append(kind(meter, task["mode"]))
        return [*probe.prepare_trainer(probe.trainer_in_construction(), task, made[-1]), made[-1]]

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
        if _is_out_of_memory(ending.error):
            raise SkippedError(OUT_OF_MEMORY)
        raise ending.error
    if not meter.over:
        found = "its Trainer ended before the steps that are measured" if made else "it made no Trainer"
        raise SkippedError(f"{found}; expected a script that makes a Trainer and calls fit.")


def _is_out_of_memory(error: BaseException) -> bool:
    # Of a CPU's allocator torch raises a RuntimeError.
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(error)


def start_ranks(task: Mapping[str, Any]) -> list[subprocess.Popen[bytes]]:
    """Start the ranks behind this one, as torchrun would, in its session, so that all are held still with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(task["ranks"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(TORCHELASTIC_RUN_ID="tune", GROUP_RANK="0", RANK="0", LOCAL_RANK="0")
    others = []
    for rank in map(str, range(1, task["ranks"])):
        environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, "-m", "lightning_turbo.tune.worker"]
        others.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment))
        others[-1].stdin.write(json.dumps({**task, "rank": rank}).encode() + b"\n")
        others[-1].stdin.flush()
    return others


def follow(task: Mapping[str, Any]) -> None:
    """Run the program on a rank behind the first, which ends it; if it fails, the first one would wait in vain."""
    meter = Meter(lambda event: {"order": "round", "lead": 0, "steps": sys.maxsize}, warmup=1)
    try:
        measure_program(task, meter)
    except SkippedError:
        pass  # the first rank says why
    except BaseException:
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Take over standard input and output, and run the program."""
    channel = open_channel()
    task = channel.receive()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(task["seed"])
    if "rank" in task:
        follow(task)
        return
    others = start_ranks(task) if task["ranks"] > 1 else []

    def ask(event: dict[str, Any]) -> dict[str, Any]:
        order = channel.ask(event)
        if order["order"] == "end":
            for each in others:
                each.kill()
        return order

    if task["batch_size"]:
        limit_memory(MARGIN)
    meter = Meter(ask, warmup=task["warmup"])
    serve(channel, meter, lambda: measure_program(task, meter))


if __name__ == "__main__":
    main()
