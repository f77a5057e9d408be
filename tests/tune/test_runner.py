"""What each process of a script is told, and what is made of its answers, with processes that answer at once."""

from typing import ClassVar

import pytest

from lightning_turbo.measure import Interrupt, InterruptedRunError, ProcessError, Progress
from lightning_turbo.tune import runner
from lightning_turbo.tune.candidates import list_candidates
from lightning_turbo.tune.promise import Stretch
from lightning_turbo.tune.runner import ScriptRunner, TuneSettings

TABLE = {each.name: each for each in list_candidates(2)}
SEEN = {"phases": {"forward": 0.01}, "accumulate": 4}


class Answers:
    """A process that answers each order at once."""

    made: ClassVar[list] = []
    look: ClassVar = {"event": "done", "numbers": {**SEEN, "trained": 0.5}}

    def __init__(self, arguments, task, **options):
        self.task, self.options, self.closed = task, options, False
        self.orders, self.told = ["start"], []
        self.made.append(self)

    def tell(self, order):
        self.orders.append(order["order"])
        self.told.append(order)

    def listen(self, timeout, check):
        check()
        if self.task["look"]:
            if isinstance(self.look, Exception):
                raise self.look
            return {**self.look, "numbers": dict(self.look.get("numbers", {}))}
        order = self.orders.pop(0)
        if order == "end":
            return {"event": "done", "numbers": {}, "peak_bytes": 0}
        return {"event": "ready" if order == "start" else "round", "seconds": 0.0, "steps": 3, "samples": 0}

    def hold(self):
        pass

    def close(self, grace=5.0):
        self.closed = True


def pass_time(now, seconds, start):
    """Return ``start`` as it is when a process takes some seconds to start."""

    def take(*arguments, **options):
        now[0] += seconds
        start(*arguments, **options)

    return take


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(runner, "Process", Answers)
    monkeypatch.setattr(Answers, "made", [])
    return Answers.made


@pytest.fixture
def measured(tmp_path, made):
    (tmp_path / "train.py").write_text("")
    settings = TuneSettings(
        program=str(tmp_path / "train.py"), out=tmp_path / "out", arguments=("--rate", "1"), minutes=2.0
    )
    return ScriptRunner(settings, TABLE, Interrupt(), Progress(), tmp_path / "scratch")


def test_a_process_receives_its_script_and_settings(measured, made, tmp_path):
    rows = measured.measure([(), ("lean", "threads-1")], Stretch(steps=7, turns=3))
    assert {names: row["status"] for names, row in rows.items()} == {(): "ok", ("lean", "threads-1"): "ok"}
    plain, ours = made
    assert {"arguments": ["--rate", "1"], "module": False, "look": 0.0, "warmup": 3}.items() <= ours.task.items()
    assert ours.task["settings"] == {**plain.task["settings"],
        "strategy": {"device_prefetch": False, "release_gradients": False, "lean": True},
        "environment": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    }  # fmt: skip
    assert ours.task["folder"] == str(tmp_path / "scratch" / "1")
    assert plain.options["environment"] == {"WANDB_MODE": "disabled"}
    assert ours.options["environment"] == {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    assert [each.options["log"].name for each in made] == ["000 as it is.log", "001 lean + threads-1.log"]
    assert [order.get("steps") for order in ours.told] == [3, 2, 2, None], "all steps of the stretch, none beside"
    assert all(order.get("lead", 0) == 0 for order in ours.told)
    assert all(each.closed for each in made)


def test_the_first_process_looks_and_says_when_it_trains(measured, made, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Answers, "__init__", pass_time(now, 7.5, Answers.__init__))
    row = measured.look()
    assert (row["status"], row["numbers"]) == ("ok", SEEN)
    assert measured.start == 7.0, "half of a second was trained"
    assert made[0].task["look"] == pytest.approx(0.15 * 120)
    assert measured.warmup == 5, "a whole window of accumulated batches"
    assert made[0].closed


@pytest.mark.parametrize(("answer", "status", "reason"), [
    ({"event": "skipped", "reason": "it made no Trainer"}, "skipped", "it made no Trainer"),
    (ProcessError("killed by SIGKILL"), "failed", "killed by SIGKILL"),
])  # fmt: skip
def test_a_script_that_cannot_be_looked_at_has_a_reason(measured, made, monkeypatch, answer, status, reason):
    monkeypatch.setattr(Answers, "look", answer)
    row = measured.look()
    assert (row["status"], row["reason"]) == (status, reason)
    assert made[0].closed


def test_a_look_ends_with_the_time(measured, made):
    measured.interrupt.pressed = True
    with pytest.raises(InterruptedRunError):
        measured.look()
    assert made[0].closed


def test_the_start_of_processes_is_learned(measured, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Answers, "__init__", pass_time(now, 4.0, Answers.__init__))
    measured.measure([(), ("lean",)], Stretch(steps=3))
    assert measured.start == 4.0


def test_settings_of_the_command_name_the_command():
    settings = TuneSettings(program="package.train", module=True, arguments=("fit",))
    assert settings.command == ["python", "-m", "package.train", "fit"]
