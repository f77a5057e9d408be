"""``lightning-turbo tune`` on real scripts: each candidate in this process, and the complete command once."""

import dataclasses
import io
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from benchmarks.answers import ANSWERS, Answer
from lightning_turbo.cli import main
from lightning_turbo.measure import Channel, RoundTimer, SkippedError, serve
from lightning_turbo.tune.candidates import combine, list_candidates
from lightning_turbo.tune.report import yaml_text
from lightning_turbo.tune.worker import measure_program
from tests.trainers import FLAGS
from tests.versions import KNOWS_WEIGHTS_ONLY, TURBO_CANDIDATE

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
SCRIPT = """
import sys
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        with open("losses", "a") as file:
            file.write(f"{loss.item()} ")
        self.logger.experiment.log_metrics({"own": loss.item()}, self.global_step)
        return loss

    def validation_step(self, batch, batch_idx):
        Path("validated").touch()
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

assert sys.argv[1:] == ["--rate", "1"]
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 1, 8, 8), torch.arange(32) % 2)
loader = DataLoader(data, 4, shuffle=True)
callbacks = [EarlyStopping("val_loss"), LearningRateMonitor(), ModelCheckpoint("kept")]
if __name__ == "__main__":  # worker processes that are not forked read this file as well
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=CSVLogger("logged"), callbacks=callbacks, ARGUMENTS)
    trainer.fit(Module(), loader, DataLoader(data, 4))
    Path("behind").touch()
"""
TABLE = {each.name: each for each in list_candidates(2)}
PLAIN = []  # the losses of the unchanged script, once they are known
UNTRIED = {"compile", "device-prefetch", "persistent-workers", "pin-memory"}
UNTRIED |= set() if KNOWS_WEIGHTS_ONLY else {"lean"}


@pytest.fixture
def script(tmp_path):
    def write(text=SCRIPT, **arguments):
        named = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        (tmp_path / "train.py").write_text(textwrap.dedent(text).replace("ARGUMENTS", named))
        return tmp_path / "train.py"

    return write


class Ended(BaseException):
    """Raised instead of ending this process."""


@pytest.fixture(autouse=True)
def _stays_alive(monkeypatch):
    def end_process(status=0):
        if not isinstance(sys.exc_info()[1], Ended):
            raise Ended(status)

    monkeypatch.setattr("lightning_turbo.doctor.ending.end_process", end_process)


def run(program, *names, look=0.0, steps=16, module=False, arguments=("--rate", "1")):
    """Run a script in this process for a number of steps, after four that do not count."""
    asked = []
    orders = iter([{"order": "round", "lead": 4, "steps": steps}, {"order": "end"}])
    timer = RoundTimer(lambda event: asked.append(event) or next(orders), warmup=4)
    settings = dataclasses.asdict(combine(TABLE[name] for name in names))
    task = {"program": str(program), "module": module, "arguments": list(arguments), "look": look}
    task |= {"settings": settings, "folder": "written"}
    outcomes = []

    def report(find):
        if not outcomes:  # the second call reports Ended
            try:
                outcomes.append(find())
            except Exception as error:
                outcomes.append(error)

    measure_program(task, timer, report)
    if isinstance(outcomes[0], Exception):
        raise outcomes[0]
    return outcomes[0], asked


def losses():
    """Return what the script has written in its steps, and begin anew."""
    found = [float(each) for each in Path("losses").read_text().split()]
    Path("losses").unlink()
    return found


def test_a_measured_script_runs_for_some_steps_and_leaves_nothing_behind(script, tmp_path):
    _, asked = run(script())
    assert [event["event"] for event in asked] == ["ready", "round"]
    left = {path.name for path in tmp_path.iterdir()} - {"written"}
    assert left == {"train.py", "validated", "losses"}, "no checkpoint, log, or end"
    assert len(losses()) == 20, "two of its epochs and a half"


def test_a_script_that_is_looked_at_leaves_nothing_behind(script, tmp_path):
    found, asked = run(script(SCRIPT.replace("(32", "(128")), look=30.0)
    assert asked == []
    left = {path.name for path in tmp_path.iterdir()} - {"written"}
    assert left == {"train.py", "validated", "losses"}, "no checkpoint, log, or end"
    assert (found["device"], found["workers"], found["batches"], found["period"]) == ("cpu", 0, 32, 32)
    assert set(found["lacks"]) <= {"cuda", "compiler", "Lightning 2.6", "new workers"}


@pytest.mark.filterwarnings("ignore:threads=2 has no effect here")
@pytest.mark.parametrize("name", [name for name in TABLE if name not in UNTRIED])
def test_each_candidate_changes_the_losses_as_the_table_says(script, name):
    if not PLAIN:
        run(script())
        PLAIN.extend(losses())
    run(script(), name)
    found = losses()
    tolerance = {"same bits": 0.0, "rounding": 1e-4, "other maths": 0.1}[TABLE[name].result]
    epoch = 8 if name.endswith("persistent") else 20  # the second one has another order of samples
    assert found[:epoch] == pytest.approx(PLAIN[:epoch], rel=tolerance, abs=tolerance)
    if TABLE[name].result == "other maths":
        assert found != PLAIN


@pytest.mark.parametrize("name", ["prefetch", "workers-2", "lean", "bf16-mixed"])
def test_a_setting_is_in_the_trainer(script, name):
    if name in UNTRIED:
        pytest.skip("needs a newer Lightning")
    found, _ = run(script(SCRIPT.replace("(32", "(128")), name, look=30.0)
    assert ("no thread" in found["lacks"]) == (name == "prefetch")
    assert found["workers"] == (2 if name == "workers-2" else 0)
    assert ("own strategy" in found["lacks"]) == (name == "lean")
    assert ("own precision" in found["lacks"]) == (name == "bf16-mixed")


@pytest.mark.parametrize(("text", "arguments", "reason"), [
    (SCRIPT, {"strategy": "ddp", "devices": 2}, "its Trainer has strategy DDPStrategy and 2 devices; expected one"),
    ("print('no training')", {}, "it made no Trainer; expected a script that makes a Trainer and calls fit"),
    ("import argparse\nargparse.ArgumentParser().parse_args(['--wrong'])", {},
     "it made no Trainer, and ended with exit status 2: its log says why; expected"),
    ("import sys\nsys.exit('no data')", {}, "it made no Trainer, and ended with exit status 1: its log says why"),
    ("import lightning.pytorch as pl\npl.Trainer(logger=False, accelerator='cpu')", {}, "its Trainer ended before"),
])  # fmt: skip
def test_a_script_that_cannot_run_a_candidate_says_why(script, text, arguments, reason):
    with pytest.raises(SkippedError, match=reason):
        run(script(text, **arguments))


# The error of torch on a CPU without enough memory.
TOO_LARGE = "import torch\ntorch.empty(2**50)"
# The error of a callback for a network that torch.fx cannot trace.
UNTRACED = "import torch.fx.proxy\nraise ValueError('a page\\n' * 60) from torch.fx.proxy.TraceError('its words')"
UNTRACEABLE = "import torch._dynamo\nraise torch._dynamo.exc.Unsupported('a page\\n' * 60)"


@pytest.mark.parametrize(("text", "event", "reason"), [
    ("raise RuntimeError('no data')", "failed", "RuntimeError: no data"),
    ("raise OSError('a word ' * 99)", "failed", r"OSError: (a word )+.*\.\.\."),
    (TOO_LARGE, "skipped", "out of memory"),
    (UNTRACED, "skipped", "torch cannot trace this network; the log has its words."),
    (UNTRACEABLE, "skipped", "torch cannot trace this network; the log has its words."),
])  # fmt: skip
def test_a_failure_of_a_measured_script_is_reported_in_one_line(script, text, event, reason, capfd):
    written, program = io.StringIO(), script(text)
    task = {"program": str(program), "module": False, "arguments": [], "look": 0.0, "folder": "written"}
    timer = RoundTimer(dict)
    measure_program(task, timer, lambda find: serve(Channel(io.StringIO(), written), timer, find))
    said = json.loads(written.getvalue())
    assert said["event"] == event
    assert re.fullmatch(reason, said["reason"])
    assert len(said["reason"]) <= 200
    assert "Traceback" in capfd.readouterr().err, "the log has the rest"


PROGRAM = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

LightningCLI(BoringModel, seed_everything_default=0)
"""


def test_a_package_with_a_command_line_runs_and_its_configuration_is_not_saved(tmp_path):
    pytest.importorskip("jsonargparse")
    (tmp_path / "own.yaml").write_text("trainer: {accelerator: cpu, max_steps: 2}")
    (tmp_path / "program_of_mine.py").write_text(PROGRAM)
    run("program_of_mine", TURBO_CANDIDATE, module=True, arguments=["fit", "--config", "own.yaml"])
    assert {path.name for path in tmp_path.iterdir()} <= {"own.yaml", "program_of_mine.py", "__pycache__", "written"}


class Line(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        parts = torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten()
        self.layer = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 4, 8)), *parts)


COMBINATIONS = [
    (),
    (TURBO_CANDIDATE, "fused", "workers-1"),
    ("O1", "channels-last", "prefetch-threads"),
    ("bf16-mixed", "prefetch", "threads-1"),
]
# What a script or a configuration may already specify.
NAMED = {"precision": 32, "strategy": "auto", "max_steps": 3}


def check(trainer, names):
    assert trainer.global_step == 3
    assert (type(trainer.strategy).__name__ == "TurboStrategy") == bool(combine(TABLE[n] for n in names).strategy)
    assert (type(trainer.precision_plugin).__name__ == "ApexAMP") == ("O1" in names)
    assert (type(trainer.precision_plugin).__name__ == "MixedPrecision") == ("bf16-mixed" in names)


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
def test_the_written_configuration_runs_with_any_settings_of_the_original(names, tmp_path, monkeypatch):
    cli = pytest.importorskip("lightning.pytorch.cli")
    settings = combine(TABLE[name] for name in names)
    (tmp_path / "turbo.yaml").write_text(yaml_text(settings, "1.40 times as fast", ["python", "-m", "pkg"]))
    own = {**FLAGS, **NAMED, "callbacks": [{"class_path": "lightning_turbo.GradToNone"}]}
    (tmp_path / "own.yaml").write_text(json.dumps({"trainer": own}))
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--config", "own.yaml", "--config", "turbo.yaml"])
    trainer = cli.LightningCLI(Line, save_config_callback=None, seed_everything_default=0).trainer
    check(trainer, names)
    assert {type(callback).__name__ for callback in trainer.callbacks} >= {"GradToNone", *settings.callbacks}


def test_the_tune_command_finds_and_writes_an_answer(script, tmp_path, capsys):
    script(SCRIPT.replace("(32", "(128"))
    options = ["--only", "fused", "--out", "out", "train.py", "--rate", "1"]
    for minutes in ("0.2", "1"):  # where other programs run, the first process may not be ready after 12 seconds
        assert main(["tune", "--minutes", minutes, *options]) == 0
        results = json.loads((tmp_path / "out" / "tune.json").read_text())
        if results["step"] is not None:
            break
    assert results["command"] == ["python", "train.py", "--rate", "1"]
    (row,) = results["candidates"]
    assert set(row) == {"name", "why", "result"}
    assert row["name"] == "fused"
    assert results["step"]["phases"]["optimizer"] > 0.0
    assert {"tune.json", "turbo.yaml"} <= {path.name for path in (tmp_path / "out").iterdir()}
    said = capsys.readouterr()
    assert results["verdict"] in said.out
    assert "takes about" in said.err, "what a whole epoch needs, at the start"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "train.py", "validated", "losses"}


@pytest.mark.parametrize(("arguments", "message"), [
    (["absent.py"], "'absent.py' is not a file; give the path of a Python script that trains"),
    (["--minutes", "0", "train.py"], "minutes=0.0: expected a number above 0"),
    (["--only", "prefetsch", "train.py"], "'prefetsch' names no candidate; expected some of workers-1, "),
    (["--out", "train.py", "train.py"], "out='train.py': Not a directory; expected a folder that can be made"),
])  # fmt: skip
def test_invalid_command_line_arguments_are_refused(script, arguments, message, capsys):
    script()
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


EXAMPLES = Path(__file__).parents[2] / "examples" / "tune"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", ANSWERS)
def test_each_example_finds_its_answer_in_three_minutes(example, tmp_path):
    assert main(["tune", "--minutes", "3", "--out", str(tmp_path), str(EXAMPLES / f"{example}.py")]) == 0
    results = json.loads((tmp_path / "tune.json").read_text())
    assert ANSWERS[example].differs(results) == "", results["candidates"]


def test_an_answer_shows_how_results_differ_from_it():
    rows = [{"name": "fused", "why": "kept"}, {"name": "lean", "why": "no gain"}]
    results = {"chosen": {"settings": ["fused"]}, "candidates": rows}
    assert Answer(("fused",), ("le*",), {"lean": "no gain"}).differs(results) == ""
    assert Answer(("lean", "c*")).differs(results) == "expected one of lean, c*"
    assert Answer((), ("*",)).differs(results) == "fused does not help here"
    assert "expected: not tried" in Answer((), (), {"lean": "not tried"}).differs(results)
