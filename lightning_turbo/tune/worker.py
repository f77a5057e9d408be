"""One run of a script in its own process, with some settings, for some steps of ``fit``."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from lightning_turbo.doctor.script import Ending, run_program
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from lightning_turbo.measure import Channel, RoundTimer, SkippedError, end_process, limit_memory, open_channel, serve

if TYPE_CHECKING:
    from lightning_turbo.tune.probe import Probe

__all__ = ["main", "measure_program"]

Find: TypeAlias = Callable[[], Mapping[str, Any]]
"""Returns the results, or raises an exception that says why there are none."""
MARGIN = 0.9  # usable share of the free memory
OUT_OF_MEMORY = "out of memory"
LINE = 160  # characters of a message
RANK_SECONDS = 10.0  # time for a rank to exit by itself
# torch modules whose errors mean that a network cannot be compiled.
TRACERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch.fx")


def measure_program(task: Mapping[str, Any], timer: RoundTimer, report: Callable[[Find], object]) -> None:
    """Run the script or module of a task with a probe in each Trainer, and measure the first ``fit``.

    Args:
        task: What ``ScriptRunner.spawn`` sends.
        timer: The timer whose ``step`` the probe calls.
        report: Called once with a function that returns the numbers, or raises an exception that says why there are
            none. A probe that is done then ends this process, without running the program's handlers.
    """
    made: list[Probe] = []
    no_effect = _note_warnings()

    def callbacks() -> list[Any]:
        from lightning_turbo.tune import probe  # imported late, after the script has chosen its copy of Lightning

        kind = {"epoch": probe.WholeEpoch, "one batch": probe.PhaseProbe}.get(task["mode"], probe.Probe)
        made.append(kind(timer, task["mode"], task["folder"]))
        # Batch sizes are compared in rounds of whole epochs, which include everything.
        made[-1].counts_borders = bool(task["batch_size"])
        with made[-1].failing():
            return [*probe.prepare_trainer(probe.trainer_in_construction(), task, made[-1]), made[-1]]

    def end(status: int) -> int:
        report(lambda: {**_found(made, timer, Ending()), "no_effect": no_effect})
        return status

    ending = run_program(task["program"], task["arguments"], callbacks, module=task["module"], at_end=end)
    report(lambda: _found(made, timer, ending))


def _found(made: list[Probe], timer: RoundTimer, ending: Ending) -> Mapping[str, Any]:
    """Return the results of the first ``fit``, or raise an exception that says why nothing was measured."""
    error = ending.error
    for probe in made:
        if probe.refusal:
            raise SkippedError(probe.refusal)
        error = error or probe.error
    if error is not None:
        raise SkippedError(reason) if (reason := _why_skipped(error, made)) else error
    if not timer.over:
        found = "its Trainer ended before the steps that are measured" if made else "it made no Trainer"
        found += f", and ended with exit status {ending.status}: its log says why" if ending.status else ""
        raise SkippedError(f"{found}; expected a script that makes a Trainer and calls fit.")
    return next(each for each in made if each.facts).found()


def _note_warnings() -> list[str]:
    """Return a list that collects this package's warnings that something has no effect."""
    messages: list[str] = []
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, NoEffectWarning):
            messages.append(textwrap.shorten(str(message), LINE, placeholder=" ..."))
        show(message, category, *where, **more)

    warnings.simplefilter("always", TurboWarning)
    warnings.showwarning = note
    return messages


def _why_skipped(error: BaseException, made: list[Probe]) -> str:
    """Return an explanation of an error that is not the script's own; empty for any other."""
    if muted := next(filter(None, (probe.muted.explain(error) for probe in made)), ""):
        return f"{muted} ({type(error).__name__}: {textwrap.shorten(str(error), LINE, placeholder=' ...')})"
    if any(type(each).__module__.startswith(TRACERS) for each in (error, error.__cause__)):
        return "torch cannot trace this network; the log has its words."
    return OUT_OF_MEMORY if _is_out_of_memory(error) else ""


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's CPU allocator raises a RuntimeError.
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(error)


def start_ranks(task: Mapping[str, Any]) -> list[subprocess.Popen[bytes]]:
    """Start the other ranks like torchrun, in this process's session, so that all of them are held together."""
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


def end_ranks(others: list[subprocess.Popen[bytes]]) -> None:
    """End the other ranks: at the end of its input, a rank ends itself and its worker processes."""
    for each in others:
        assert each.stdin is not None
        each.stdin.close()
    for each in others:
        try:
            each.wait(RANK_SECONDS)
        except subprocess.TimeoutExpired:
            each.kill()


def follow(task: Mapping[str, Any], channel: Channel) -> None:
    """Run the program on another rank, which the first one ends; on failure kill all ranks."""
    timer = RoundTimer(lambda event: {"order": "round", "lead": 0, "steps": sys.maxsize}, warmup=1)

    def end_with_input() -> None:
        channel.orders.read()
        end_process()

    def report(find: Find) -> None:
        try:
            find()
        except SkippedError:
            pass  # the first rank says why
        except BaseException:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_input, daemon=True).start()
    measure_program(task, timer, report)


def main() -> None:
    """Use standard input and output as the channel, and run the program."""
    channel = open_channel()
    task = channel.receive()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(task["seed"])
    if "rank" in task:
        follow(task, channel)
        return
    others = start_ranks(task) if task["ranks"] > 1 else []
    if task["batch_size"]:
        limit_memory(MARGIN)
    timer = RoundTimer(channel.ask, warmup=task["warmup"])

    def report(find: Find) -> None:
        serve(channel, timer, find)
        end_ranks(others)

    measure_program(task, timer, report)


if __name__ == "__main__":
    main()
