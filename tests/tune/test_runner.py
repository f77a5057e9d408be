"""The length and order of rounds, and which processes are forked, tested with fake processes."""

import dataclasses
import os
import subprocess
from typing import ClassVar

import pytest

from lightning_turbo.measure import Interrupt, Progress
from lightning_turbo.tune import runner
from lightning_turbo.tune.candidates import list_candidates
from lightning_turbo.tune.evidence import DEFAULT, Configuration
from lightning_turbo.tune.fork_server import CAN_FORK
from lightning_turbo.tune.runner import ScriptRunner, TuneSettings

LEAN = Configuration(("lean",))
TABLE = {each.name: each for each in list_candidates(2)}


class Answers:
    """A process that answers each order at once."""

    made: ClassVar[list] = []
    facts: ClassVar[dict] = {"batches": 10, "device": "cpu"}

    def __init__(self, arguments, task, **options):
        self.task, self.options = task, options
        self.orders = ["start"]
        self.heard = []
        self.made.append(self)

    def tell(self, order):
        self.orders.append(order["order"])

    def listen(self, timeout, check):
        order = self.orders.pop(0)
        self.heard.append(order)
        if order == "end":
            numbers = {"facts": self.facts, "lightning": "lightning.pytorch", "losses": []}
            return {"event": "done", "numbers": numbers, "peak_bytes": 0}
        event = {"start": "ready", "border": "border"}.get(order, "round")
        return {"event": event, "seconds": 0.2, "steps": 3, "samples": 0}

    def hold(self):
        pass

    def resume(self):
        pass

    def close(self, grace=5.0):
        pass


class Servers:
    """Records the fork servers that are created and the processes that they start."""

    def __init__(self):
        self.made = []
        self.started = []
        self.closed = []

    def __call__(self, modules, **options):
        self.made.append(options["environment"])
        self.modules = modules
        return self

    def popen(self, command, **options):
        self.started.append(command)

    def close(self):
        self.closed.append(len(self.closed))


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(runner, "Process", Answers)
    monkeypatch.setattr(Answers, "made", [])
    return Answers.made


@pytest.fixture
def make(tmp_path, made):
    (tmp_path / "train.py").write_text("")
    settings = TuneSettings(program=str(tmp_path / "train.py"), out=tmp_path / "out", arguments=("--rate", "1"), seed=3)

    def make_one(**changes):
        changed = dataclasses.replace(settings, **changes)
        return ScriptRunner(changed, TABLE, Interrupt(), Progress(), tmp_path / "scratch")

    return make_one


@pytest.mark.parametrize(
    ("step_seconds", "accumulate", "steps", "lead", "warmup"),
    [
        (0.01, 1, 20, 3, 10),
        (0.01, 4, 20, 3, 10),
        (0.01, 8, 16, 2, 9),  # two windows
        (10.0, 1, 1, 1, 3),
        (10.0, 3, 3, 1, 4),
        (0.0, 1, 500, 63, 250),
        (0.0, 600, 600, 75, 601),  # one window may be longer than a usual round
    ],
)
def test_rounds_of_a_fifth_of_a_second_consist_of_whole_windows(make, step_seconds, accumulate, steps, lead, warmup):
    made = make()
    made.set_pace(step_seconds, accumulate)
    assert made.order == {"steps": steps, "lead": lead}
    assert made.warmup == warmup


def test_the_second_comparison_starts_the_processes_in_the_opposite_order(make, made):
    measured = make()
    for _ in range(2):
        rows = measured.measure([DEFAULT, LEAN])
        assert {row["status"] for row in rows.values()} == {"ok"}
        assert [len(row["rounds"]) for row in rows.values()] == [4, 4]
    lean = ["lean" in process.options["log"].name for process in made]
    assert lean == [False, True, True, False]
    assert [process.options["log"].name[:3] for process in made] == ["000", "001", "002", "003"]


@pytest.mark.parametrize("batches", [10, 0])
def test_after_a_process_without_an_epoch_boundary_no_other_one_waits_for_it(make, made, monkeypatch, batches):
    monkeypatch.setattr(Answers, "facts", {**Answers.facts, "batches": batches})
    measured = make()
    measured.measure([DEFAULT])
    measured.measure([LEAN])
    assert ["border" in process.heard for process in made] == [True, batches > 0]


@pytest.mark.parametrize(("device", "ranks", "forks"), [("cpu", 1, CAN_FORK), ("cuda:0", 1, False), ("cpu", 2, False)])
def test_after_a_process_that_used_only_the_cpu_the_others_are_forked(
    make, made, monkeypatch, tmp_path, device, ranks, forks
):
    servers = Servers()
    monkeypatch.setattr(runner, "ForkServer", servers)
    monkeypatch.setattr(Answers, "facts", {**Answers.facts, "device": device})
    with make(ranks=ranks) as measured:
        measured.measure([DEFAULT])
        measured.measure([LEAN])
        first, second = (process.options["popen"] for process in made)
        assert first is subprocess.Popen
        assert (second is not subprocess.Popen) == forks
        if forks:
            for number, variable in enumerate(("a", "b", "a")):
                second(["python", str(number)], cwd=tmp_path, env={"X": variable})
    assert servers.made == ([{"X": "a"}, {"X": "b"}] if forks else []), "one for each environment"
    assert servers.started == ([["python", "0"], ["python", "1"], ["python", "2"]] if forks else [])
    assert len(servers.closed) == len(servers.made)
    if forks:
        assert servers.modules == ["lightning_turbo.tune.worker", "lightning.pytorch"]


def test_a_process_receives_its_script_and_settings(make, made, tmp_path):
    make(ranks=2, device="cpu").spawn(dataclasses.replace(LEAN, mode="epoch"))
    make().spawn(DEFAULT)
    ours, plain = made
    wanted = {"arguments": ["--rate", "1"], "mode": "epoch", "ranks": 2, "seed": 3, "warmup": 3}
    assert wanted.items() <= ours.task.items()
    assert ours.task["settings"] != plain.task["settings"]
    assert ours.task["folder"] == str(tmp_path / "scratch" / "0")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    assert hidden.items() <= ours.options["environment"].items()
    assert not set(hidden) & set(plain.options["environment"])
