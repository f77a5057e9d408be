"""The end of a measured script: whatever it saves in handlers, callbacks, or behind fit is not written."""

import dataclasses
import json
import textwrap
from pathlib import Path

import pytest

from lightning_turbo.measure import RoundTimer
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


def ends(mode="step", step="pass", arguments="", names=(), order="end", text=SCRIPT):
    """Measure the script in a child, and return what it reported, its exit status, and the files that it left."""
    Path("train.py").write_text(textwrap.dedent(text).replace("STEP", step).replace("ARGUMENTS", arguments))
    task = {
        "program": "train.py",
        "module": False,
        "arguments": [],
        "mode": mode,
        "ranks": 1,
        "batch_size": 0,
        "folder": "written",
    }
    task["settings"] = dataclasses.asdict(combine(TABLE[name] for name in names))
    orders = iter([{"order": "round", "lead": 2, "steps": 4}, {"order": order}])

    def report(find):
        try:
            said = f"{len(find()['losses'])} losses"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        with open("reported.json", "a") as file:
            file.write(json.dumps(said))

    status = status_of_child(lambda: measure_program(task, RoundTimer(lambda event: next(orders)), report))
    files = sorted(path.name for path in Path().iterdir() if path.name not in ("train.py", "reported.json"))
    return json.loads(Path("reported.json").read_text()), status, files


@pytest.mark.parametrize("mode", ["step", pytest.param("one batch", marks=pytest.mark.slow)])
def test_a_script_whose_steps_are_over_saves_nothing(mode):
    assert ends(mode) == ("6 losses", 0, IN_STEP)


def test_a_script_whose_loader_alone_is_measured_saves_nothing():
    assert ends("loader") == ("0 losses", 0, [])


def test_a_script_whose_epoch_is_over_saves_nothing():
    assert ends("epoch") == ("0 losses", 0, IN_STEP)


@pytest.mark.parametrize(
    "error",
    [
        "1 / 0",
        *(pytest.param(f"raise {each}", marks=pytest.mark.slow) for each in ("SystemExit(3)", "KeyboardInterrupt")),
    ],
)
def test_a_script_in_which_a_step_fails_saves_nothing(error):
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
def test_a_copy_that_a_script_forks_reports_nothing(end):
    """Its end is not that of the script, which goes on to train."""
    before = f"""
    import os, sys
    if (child := os.fork()) == 0:
        {end}
        sys.exit()
    os.waitpid(child, 0)
    """
    assert ends(text=textwrap.dedent(before) + textwrap.dedent(SCRIPT)) == ("6 losses", 0, IN_STEP)
