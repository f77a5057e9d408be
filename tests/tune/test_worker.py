"""A measured script: its orders and answers, its ranks, and that it saves nothing at its end."""

import dataclasses
import json
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from lightning_turbo.measure import RoundTimer
from lightning_turbo.tune import worker
from lightning_turbo.tune.candidates import combine, list_candidates
from lightning_turbo.tune.worker import measure_program
from tests.children import status_of_child

SCRIPT = """
    import atexit
    from pathlib import Path
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    def save(place):
        Path("saved " + place).touch()

    class Saves(Callback):
        def on_exception(self, *args): save("on_exception")
        def on_train_end(self, *args): save("on_train_end")
        def on_fit_end(self, *args): save("on_fit_end")
        def teardown(self, *args): save("teardown")

    class Model(BoringModel):
        def on_train_end(self): save("on_train_end of the module")
        def on_fit_end(self): save("on_fit_end of the module")
        def teardown(self, stage): save("teardown of the module")
        def training_step(self, batch, batch_idx):
            Path("written in a step").touch()
            STEP
            return super().training_step(batch, batch_idx)

    atexit.register(save, "atexit")
    try:
        Trainer(accelerator="cpu", max_epochs=2, callbacks=[Saves()], enable_checkpointing=False, logger=False,
                enable_progress_bar=False, enable_model_summary=False, ARGUMENTS).fit(Model())
        save("behind fit")
    except:
        save("except")
        raise
    finally:
        save("finally")
"""
TABLE = {each.name: each for each in list_candidates(2)}
IN_STEP = ["written in a step"]


def task_of(mode="step", names=(), step="pass", arguments="", text=SCRIPT, **more):
    """Write the script, and return the task to measure it."""
    Path("train.py").write_text(textwrap.dedent(text).replace("STEP", step).replace("ARGUMENTS", arguments))
    return {
        "program": "train.py",
        "module": False,
        "arguments": [],
        "mode": mode,
        "ranks": 1,
        "batch_size": 0,
        "folder": "written",
        "settings": dataclasses.asdict(combine(TABLE[name] for name in names)),
        **more,
    }


def ends(mode="step", order="end", **options):
    """Measure the script in a child process, and return its events, its exit status, and its files."""
    task = task_of(mode, **options)
    orders = iter([{"order": "round", "lead": 2, "steps": 4}, {"order": order}])

    def report(find):
        try:
            said = f"{len(find()['losses'])} losses"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        with open("reported.json", "a") as file:
            file.write(json.dumps(said))

    status = status_of_child(lambda: measure_program(task, RoundTimer(lambda event: next(orders)), report))
    return json.loads(Path("reported.json").read_text()), status, left()


OURS = ("train.py", "reported.json", "events")


def left():
    """Return the names of the files that a script has written."""
    return sorted(path.name for path in Path().iterdir() if path.name not in OURS)


@pytest.mark.parametrize("mode", ["step", pytest.param("one batch", marks=pytest.mark.slow)])
def test_a_script_saves_nothing_after_its_measured_steps(mode):
    assert ends(mode) == ("6 losses", 0, IN_STEP)


def test_a_script_saves_nothing_after_its_loader_is_measured():
    assert ends("loader") == ("0 losses", 0, [])


def test_a_script_saves_nothing_after_its_measured_epoch():
    assert ends("epoch") == ("0 losses", 0, IN_STEP)


@pytest.mark.parametrize(
    "error",
    [
        "1 / 0",
        *(pytest.param(f"raise {each}", marks=pytest.mark.slow) for each in ("SystemExit(3)", "KeyboardInterrupt")),
    ],
)
def test_a_script_saves_nothing_after_a_failed_step(error):
    said, status, files = ends(step=error)
    assert (status, files) == (1, IN_STEP)
    assert said.startswith("ZeroDivisionError" if error == "1 / 0" else "SkippedError: its Trainer ended before")


def test_a_script_that_refuses_the_settings_saves_nothing(monkeypatch):
    monkeypatch.setattr("lightning_turbo.tune.probe.replace_in_construction", lambda *given: 1 / 0)
    assert ends() == ("ZeroDivisionError: division by zero", 1, [])


def test_a_script_that_cannot_be_measured_saves_nothing():
    said, status, files = ends(arguments="devices=2, strategy='ddp'")
    assert said.startswith("SkippedError: its Trainer has strategy DDPStrategy")
    assert (status, files) == (0, [])


@pytest.mark.parametrize("end", ["sys.exit(0)", "1 / 0", "pass"])
def test_a_forked_copy_of_a_script_reports_nothing(end):
    """Its end is not that of the script, which continues to train."""
    before = f"""
    import os, sys
    if (child := os.fork()) == 0:
        {end}
        sys.exit()
    os.waitpid(child, 0)
    """
    assert ends(text=textwrap.dedent(before) + textwrap.dedent(SCRIPT)) == ("6 losses", 0, IN_STEP)


def events_of_main(task, *orders, ends_input=lambda: True):
    """Run ``main`` in a child with these orders as its input, which ends once ``ends_input()`` is true.

    Returns:
        The exit status, and the events that it sent.
    """
    os.mkfifo("orders")
    over = threading.Event()

    def send():
        with open("orders", "w") as pipe:
            pipe.writelines(json.dumps(order) + "\n" for order in (task, *orders))
            pipe.flush()
            while not (ends_input() or over.wait(0.02)):
                pass

    def run_main():
        for name, flags, standard in (("orders", os.O_RDONLY, 0), ("events", os.O_WRONLY | os.O_CREAT, 1)):
            os.dup2(os.open(name, flags), standard)
        worker.main()
        os._exit(0)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        status = status_of_child(run_main)
    finally:
        over.set()
        sender.join()
    os.remove("orders")
    return status, [json.loads(line) for line in Path("events").read_text().splitlines()]


ORDERS = {"order": "round", "lead": 2, "steps": 4}, {"order": "end"}
DRAWS = "import torch; Path('drawn').write_text(str(torch.rand(()).item()))"


def test_the_worker_sets_its_seed_and_answers_orders(monkeypatch):
    monkeypatch.setattr(worker, "limit_memory", lambda share: Path("limited").touch())
    task = task_of(step=DRAWS, seed=3, warmup=1)
    drawn = []
    for batch_size in (0, 4):
        status, events = events_of_main({**task, "batch_size": batch_size}, *ORDERS)
        assert status == 0
        assert [event["event"] for event in events] == ["ready", "round", "done"]
        assert len(events[-1]["numbers"]["losses"]) == 6, "from the lead and the round"
        drawn.append(Path("drawn").read_text())
        assert Path("limited").exists() == (batch_size > 0)
    assert drawn[0] == drawn[1]


def test_a_script_saves_nothing_after_its_controlling_program_ended():
    status, events = events_of_main(task_of(seed=0, warmup=1), ORDERS[0])
    assert (status, [event["event"] for event in events]) == (1, ["ready", "round"])
    assert left() == IN_STEP


def test_another_rank_trains_until_its_input_ends_and_saves_nothing():
    endless = SCRIPT.replace("max_epochs=2", "max_epochs=-1")
    task = task_of(text=endless, seed=0, rank="1")
    assert events_of_main(task, ends_input=Path("written in a step").exists) == (0, [])
    assert left() == IN_STEP


@pytest.mark.parametrize(
    ("options", "status"), [({"step": "1 / 0"}, -signal.SIGKILL), ({"text": "import sys; sys.exit()"}, 0)]
)
def test_a_failed_rank_ends_all_ranks_and_a_skipped_one_does_not(monkeypatch, options, status):
    killed = worker.os.killpg

    def kill_session(group, number):
        os.setsid()  # only that of the child, not that of the tests
        killed(group, number)

    monkeypatch.setattr(worker.os, "killpg", kill_session)
    assert events_of_main(task_of(seed=0, rank="1", **options), ends_input=lambda: False)[0] == status


RANK = """#!/bin/sh
echo "$@ $RANK $LOCAL_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE at $MASTER_ADDR" > "rank $RANK"
[ "$RANK" = 1 ] && exec cat > "task 1"
read task && exec sleep 60
"""


def test_other_ranks_are_started_like_torchrun_and_end_with_their_input(tmp_path, monkeypatch):
    (tmp_path / "python").write_text(RANK)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(worker, "RANK_SECONDS", 1.0)

    def start():
        others = worker.start_ranks({"ranks": 3, "mode": "step"})
        worker.end_ranks(others)
        Path("ended").write_text(json.dumps([each.wait() for each in others]))
        os._exit(0 if os.environ["RANK"] == "0" else 1)

    assert status_of_child(start) == 0
    assert json.loads(Path("ended").read_text()) == [0, -signal.SIGKILL], "the second one does not listen"
    assert json.loads(Path("task 1").read_text()) == {"ranks": 3, "mode": "step", "rank": "1"}
    for rank in (1, 2):
        said = Path(f"rank {rank}").read_text()
        assert said == f"-m lightning_turbo.tune.worker {rank} {rank} of 3 3 at 127.0.0.1\n"
