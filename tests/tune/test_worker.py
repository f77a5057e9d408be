"""A measured script: its orders and answers, and that it saves nothing at its end."""

import dataclasses
import json
import os
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
            Path(f"{batch_idx} steps").unlink(missing_ok=True)
            Path(f"{batch_idx + 1} steps").touch()
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


def task_of(names=(), step="pass", arguments="", text=SCRIPT, look=0.0, **more):
    """Write the script, and return the task to measure it."""
    Path("train.py").write_text(textwrap.dedent(text).replace("STEP", step).replace("ARGUMENTS", arguments))
    return {
        "program": "train.py",
        "module": False,
        "arguments": [],
        "look": look,
        "folder": "written",
        "settings": dataclasses.asdict(combine(TABLE[name] for name in names)),
        **more,
    }


def ends(**options):
    """Measure the script in a child process, and return what it reports, its exit status, and its files."""
    task = task_of(**options)
    orders = iter([{"order": "round", "lead": 2, "steps": 4}, {"order": "end"}])

    def report(find):
        try:
            said = f"found {', '.join(find())}".strip()
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


def test_a_script_saves_nothing_after_its_measured_steps():
    assert ends() == ("found", 0, ["6 steps", *IN_STEP])


def test_a_script_saves_nothing_after_it_was_looked_at():
    said, status, files = ends(look=30.0)
    assert said.startswith("found phases, device, lacks, ")
    assert (status, files[1:]) == (0, IN_STEP)


@pytest.mark.parametrize(
    "error",
    [
        "1 / 0",
        *(pytest.param(f"raise {each}", marks=pytest.mark.slow) for each in ("SystemExit(3)", "KeyboardInterrupt")),
    ],
)
def test_a_script_saves_nothing_after_a_failed_step(error):
    said, status, files = ends(step=error)
    assert (status, files) == (1, ["1 steps", *IN_STEP])
    assert said.startswith("ZeroDivisionError" if error == "1 / 0" else "SkippedError: its Trainer ended before")


def test_a_script_that_refuses_the_settings_saves_nothing(monkeypatch):
    monkeypatch.setattr("lightning_turbo.tune.probe.replace_strategy", lambda *given: 1 / 0)
    assert ends(names=["lean"]) == ("ZeroDivisionError: division by zero", 1, [])


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
    assert ends(text=textwrap.dedent(before) + textwrap.dedent(SCRIPT)) == ("found", 0, ["6 steps", *IN_STEP])


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
        for name, flags, standard in (("orders", os.O_RDONLY, 0), ("events", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1)):
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


def test_the_worker_sets_its_seed_and_answers_orders():
    drawn = []
    for _ in range(2):
        status, events = events_of_main(task_of(step=DRAWS, warmup=1), *ORDERS)
        assert status == 0
        assert [event["event"] for event in events] == ["ready", "round", "done"]
        assert Path("6 steps").exists(), "from the lead and the round"
        drawn.append(Path("drawn").read_text())
    assert drawn[0] == drawn[1]


def test_a_script_saves_nothing_after_its_controlling_program_ended():
    status, events = events_of_main(task_of(warmup=1), ORDERS[0])
    assert (status, [event["event"] for event in events]) == (1, ["ready", "round"])
    assert left() == ["6 steps", *IN_STEP]
