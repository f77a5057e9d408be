"""``lightning-turbo tune`` on real scripts: each candidate in this process, and the complete command once."""

import dataclasses
import io
import json
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import TorchCheckpointIO

from benchmarks.answers import ANSWERS, Answer
from lightning_turbo import GradToNone
from lightning_turbo.cli import main
from lightning_turbo.measure import Channel, Interrupt, Progress, RoundTimer, SkippedError, serve
from lightning_turbo.tune.candidates import combine, list_candidates, list_rank_candidates
from lightning_turbo.tune.evidence import DEFAULT, Configuration
from lightning_turbo.tune.report import script_text, yaml_text
from lightning_turbo.tune.runner import ScriptRunner, TuneSettings
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
    trainer.fit(Module(), loader, loader)
    Path("behind").touch()
"""
TABLE = {each.name: each for each in list_candidates(2)}
ON_CPU = [n for n in TABLE if n not in ("compile-graphs", "device-prefetch")]
PLAIN = []  # the losses of the unchanged script, once they are known
UNTRIED = {"compile", "pack", "augment-batches", "persistent-workers", "pin-memory"} | (
    set() if KNOWS_WEIGHTS_ONLY else {"lean"}
)


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


def run(program, *names, mode="step", steps=20, warmup=4, module=False, arguments=("--rate", "1"), batch_size=0):
    """Run a script in this process for a given number of steps."""
    asked = []
    orders = iter([{"order": "round", "lead": warmup, "steps": steps - warmup}, {"order": "border"}, {"order": "end"}])
    timer = RoundTimer(lambda event: asked.append(event) or next(orders), warmup=warmup)
    settings = dataclasses.asdict(combine(TABLE[name] for name in names))
    task = {"program": str(program), "module": module, "arguments": list(arguments), "mode": mode}
    task |= {"settings": settings, "ranks": 1, "batch_size": batch_size, "folder": "written"}
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


@pytest.mark.parametrize("mode", ["step", "one batch", "loader"])
def test_a_measured_script_runs_for_some_steps_and_leaves_nothing_behind(script, mode, tmp_path):
    found, asked = run(script(), mode=mode)
    assert [event["event"] for event in asked] == ["ready", "round", "border"]
    left = {path.name for path in tmp_path.iterdir()} - {"written"}
    assert left == {"train.py", "validated"}, "no checkpoint, log, or end"
    assert len(found["losses"]) == {"step": 22, "one batch": 22, "loader": 0}[mode], (
        "two boundaries, with one batch each"
    )
    if mode == "one batch":
        assert found["losses"][-1] < 0.8 * found["losses"][0], "it overfits"
    facts = found["facts"]
    assert (facts["device"], facts["num_workers"], facts["batches"]) == ("cpu", 0, 8)
    assert set(facts["lacks"]) <= {"cuda", "compiler", "huge pages", "Lightning 2.6", "new workers"}


def test_a_measured_epoch_validates_as_the_script_does(script, tmp_path):
    found, asked = run(script(max_steps=100), mode="epoch")
    assert asked == [{"event": "ready"}], "after its first batch"
    assert 0.0 < found["steps_seconds"] < found["seconds"]
    assert set(found["metrics"]) == {"train_loss", "val_loss"}
    left = {path.name for path in tmp_path.iterdir()} - {"written"}
    assert left == {"train.py", "validated"}, "no checkpoint, log, or end"


@pytest.mark.parametrize(("size", "batches"), [(0, 8), (16, 2), (20, 2)])
def test_a_script_runs_with_another_batch_size(script, size, batches):
    found, _ = run(script(), batch_size=size)
    assert found["facts"]["batches"] == batches
    assert found["batches"] == {"size": size or 4, "drop_last": False, "samples": 32, "optimizers": ["Adam"]}
    with pytest.raises(SkippedError, match="expected a DataLoader with a batch_size"):
        run(script(SCRIPT.replace("DataLoader(data, 4, shuffle=True)", "DataLoader(data, None)")), batch_size=size or 4)


@pytest.mark.parametrize("name", [name for name in ON_CPU if name not in UNTRIED])
def test_each_candidate_changes_the_losses_as_the_table_says(script, name):
    if not PLAIN:
        PLAIN.extend(run(script())[0]["losses"])
    plain = PLAIN
    found, _ = run(script(), name)
    tolerance = {"same bits": 0.0, "rounding": 1e-4, "other maths": 0.1}[TABLE[name].result]
    epoch = 8 if name.endswith("persistent") else 20  # the second one has another order of samples
    assert found["losses"][:epoch] == pytest.approx(plain[:epoch], rel=tolerance, abs=tolerance)
    if TABLE[name].result == "other maths":
        assert found["losses"] != plain
    facts, lacks = found["facts"], found["facts"]["lacks"]
    assert ("no thread" in lacks) == (TABLE[name].slot == "loading")
    assert facts["num_workers"] == (int(name.split("-")[1]) if name.startswith("workers-") else 0)
    assert ("own strategy" in lacks) == bool(TABLE[name].strategy)
    assert ("own precision" in lacks) == (TABLE[name].slot == "precision")


def with_monai(steps, extra=""):
    """The script, with images that transforms of MONAI change."""
    data = f"""
from monai import transforms as m
from monai.data import Dataset
items = [{{"x": torch.randn(1, 8, 8), "mask": torch.ones(1, 8, 8), "y": n % 2}} for n in range(32)]
data = Dataset(items, m.Compose([m.ScaleIntensityd("x"), {steps}]))
{extra}
"""
    text = SCRIPT.replace("batch[0]", 'batch["x"]').replace("batch[1]", 'batch["y"]')
    return re.sub("data = TensorDataset.*", lambda found: data, text)


RANDOM = (
    'm.RandFlipd(["x", "mask"], prob=0.5, spatial_axis=[0]), m.RandGaussianNoised("x", prob=1.0), m.EnsureTyped("x")'
)


def test_random_transforms_are_moved_after_the_collate_function(script):
    pytest.importorskip("monai")
    program = script(with_monai(RANDOM))
    plain, _ = run(program)
    assert plain["facts"]["random_part"] == (
        "take RandFlipd, RandGaussianNoised out of the dataset's transforms, put augment.IndexedDataset around the "
        "dataset, and add AugmentBatches(augment.BatchAugmentation([augment.RandomFlip(p=0.5), "
        "augment.RandomGaussianNoise(p=1.0)], seed=0, image='x', mask=['mask'])) to the callbacks, with your axes and "
        "ranges"
    )
    calls = "data[0]; assert len(data.transform.transforms) == 4"
    found, _ = run(script(with_monai(RANDOM, calls)), "augment-batches", "prefetch")
    assert len(found["losses"]) == 22
    assert found["facts"]["random_part"] == "", "it is moved"
    still, _ = run(script(with_monai('m.EnsureTyped("x")')))
    assert found["losses"] != still["losses"], "batches are augmented"
    assert still["facts"]["random_part"] == ""


@pytest.mark.parametrize("data", ['Dataset(items, m.Compose([m.EnsureTyped("x")]))', "items"])
def test_random_transforms_are_moved_in_a_measured_epoch(script, data):
    pytest.importorskip("monai")
    text = with_monai(RANDOM, f"validation = DataLoader({data}, 4)").replace("loader, loader", "loader, validation")
    text = text.replace("self.trainer.estimated_stepping_batches", "8")  # which would load training data first
    found, _ = run(script(text), "augment-batches", mode="epoch")
    assert found["facts"]["random_part"] == "", "it is moved, though the sanity check comes first"


@pytest.mark.parametrize(("steps", "words"), [
    (RANDOM, r"packing takes .* s \(\d+ samples: .* ms each to load, .* packed\) and (pays from epoch|saves nothing)"),
    ('m.Lambdad("x", lambda x: x + torch.rand(1))', "its samples draw random numbers; pack what comes before"),
    ('m.Lambdad("y", lambda y: torch.tensor(y).bfloat16())', r"its samples cannot be packed: TypeError\('y: expected"),
])  # fmt: skip
def test_packing_is_timed_without_random_transforms(script, steps, words):
    pytest.importorskip("monai")
    facts = run(script(with_monai(steps), num_sanity_val_steps=0), mode="loader")[0]["facts"]
    assert re.match(words, facts["packing"])


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
    task = {"program": str(program), "module": False, "arguments": [], "mode": "step", "folder": "written"}
    timer = RoundTimer(dict)
    measure_program(task, timer, lambda find: serve(Channel(io.StringIO(), written), timer, find))
    said = json.loads(written.getvalue())
    assert said["event"] == event
    assert re.fullmatch(reason, said["reason"])
    assert len(said["reason"]) <= 200
    assert "Traceback" in capfd.readouterr().err, "the log has the rest"


RANKS = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, STRATEGY).fit(BoringModel())
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["devices=1", "devices=2, strategy='ddp'"])
def test_two_ranks_are_measured_in_interleaved_rounds(script, strategy, tmp_path):
    settings = TuneSettings(program=str(script(RANKS.replace("STRATEGY", strategy))), ranks=2, out=tmp_path)
    table = {each.name: each for each in list_rank_candidates(2, 2)}
    interrupt = Interrupt()
    runner = ScriptRunner(settings, table, interrupt, Progress(), tmp_path / "scratch")
    configurations = [
        DEFAULT,
        Configuration(("bucket-view",)),
        Configuration(("host-signals", "static-graph", "workers-1")),
    ]
    rows = runner.measure(configurations)
    assert [row["status"] for row in rows.values()] == ["ok"] * 3, rows
    assert all(len(row["rounds"]) == 4 for row in rows.values())
    losses = [row["numbers"]["losses"] for row in rows.values()]
    assert losses[0] == losses[1] == losses[2]
    assert rows[DEFAULT]["numbers"]["facts"]["batches"] == 32, "of 64 samples, each rank has its half"
    fails = runner.measure([Configuration(("fused",))]) if strategy == "devices=1" else {}
    assert all(row["status"] == "ok" for row in fails.values())


PROGRAM = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

LightningCLI(BoringModel, seed_everything_default=0)
"""


def test_a_package_with_a_command_line_runs_and_its_configuration_is_not_saved(tmp_path):
    pytest.importorskip("jsonargparse")
    (tmp_path / "own.yaml").write_text("trainer: {accelerator: cpu, max_steps: 2}")
    (tmp_path / "program_of_mine.py").write_text(PROGRAM)
    found, _ = run("program_of_mine", TURBO_CANDIDATE, module=True, arguments=["fit", "--config", "own.yaml"])
    assert len(found["losses"]) == 20 + 18, "every second batch is the first one after a boundary"
    assert "own strategy" in found["facts"]["lacks"]
    assert {path.name for path in tmp_path.iterdir()} <= {"own.yaml", "program_of_mine.py", "__pycache__", "written"}


class Line(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        parts = torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten()
        self.layer = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 4, 8)), *parts)


COMBINATIONS = [
    (),
    (TURBO_CANDIDATE, "fused", "workers-1"),
    ("O1", "channels-last", "no-bias"),
    ("bf16-mixed", "prefetch", "huge-pages"),
]
IO = TorchCheckpointIO()
# What a script or a configuration may already specify.
NAMED = {"precision": 32, "strategy": "auto", "max_steps": 3}


def check(trainer, names):
    assert trainer.global_step == 3
    assert (type(trainer.strategy).__name__ == "TurboStrategy") == bool(combine(TABLE[n] for n in names).strategy)
    assert (type(trainer.precision_plugin).__name__ == "ApexAMP") == ("O1" in names)
    assert (type(trainer.precision_plugin).__name__ == "MixedPrecision") == ("bf16-mixed" in names)


@pytest.mark.parametrize("plugins", [None, IO, [IO]], ids=["none", "one", "list"])
@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
def test_the_written_script_runs_with_any_arguments_of_the_trainer(names, plugins, tmp_path):
    text = script_text(combine(TABLE[name] for name in names), "1.40 times as fast", ["python", "train.py"])
    (tmp_path / "turbo.py").write_text(text)
    assert text.count("\n") <= 24
    assert ("THP_MEM_ALLOC_ENABLE=1 python train.py" in text) == ("huge-pages" in names)
    turbo = runpy.run_path(str(tmp_path / "turbo.py"))["turbo"]
    trainer = Trainer(**turbo(**FLAGS, **NAMED, plugins=plugins, callbacks=GradToNone()))
    trainer.fit(Line())
    check(trainer, names)
    assert any(isinstance(each, GradToNone) for each in trainer.callbacks)
    assert not plugins or combine(TABLE[n] for n in names).strategy or trainer.strategy.checkpoint_io is IO


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


@pytest.mark.parametrize(("names", "strategy", "arguments"), [
    (("workers-1",), "DDPStrategy", {}),
    (("bucket-view", "static-graph"), "TurboDDPStrategy", {"gradient_as_bucket_view": True, "static_graph": True}),
    (("host-signals", "bucket-view"), "TurboDDPStrategy", {"gradient_as_bucket_view": True}),
])  # fmt: skip
def test_the_written_script_for_ranks_creates_a_trainer_with_them(names, strategy, arguments, tmp_path, monkeypatch):
    table = {each.name: each for each in list_rank_candidates(2, 2)}
    settings = combine(table[name] for name in names)
    (tmp_path / "turbo.py").write_text(script_text(settings, "1.40 times as fast", ["python", "train.py"]))
    made = [Trainer(**runpy.run_path(str(tmp_path / "turbo.py"))["turbo"](**FLAGS))]
    if cli := pytest.importorskip("lightning.pytorch.cli"):
        (tmp_path / "turbo.yaml").write_text(yaml_text(settings, "1.40 times as fast", ["python", "train.py"]))
        (tmp_path / "own.yaml").write_text(json.dumps({"trainer": FLAGS}))
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", "own.yaml", "--config", "turbo.yaml"])
        made.append(cli.LightningCLI(Line, run=False, save_config_callback=None, seed_everything_default=0).trainer)
    for trainer in made:
        assert (type(trainer.strategy).__name__, trainer.num_devices) == (strategy, 2)
        assert {**trainer.strategy._ddp_kwargs, **arguments} == trainer.strategy._ddp_kwargs


def test_the_tune_command_finds_and_writes_an_answer(script, tmp_path, capsys):
    script()
    options = ["--minutes", "0.05", "--only", "release-gradients", "--out", "out", "train.py", "--rate", "1"]
    assert main(["tune", *options]) == 0
    results = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert results["command"] == ["python", "train.py", "--rate", "1"]
    assert results["chosen"]["settings"] == []
    (row,) = results["candidates"]
    assert row["name"] == "release-gradients"
    assert set(row) >= {"name", "ratio", "interval", "kept", "why", "result"}
    assert set(results) >= {"default", "headroom", "candidates", "chosen"}
    assert {"tune.json", "turbo.yaml", "turbo.py"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "nothing" in capsys.readouterr().out
    assert main(["tune", "--resume", "--seed", "1", *options]) == 2
    assert "measured.json has another seed. Leave --resume out" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["absent.py"], "'absent.py' is not a file; give the path of a Python script that trains"),
    (["--minutes", "0", "train.py"], "minutes=0.0: expected a number above 0"),
    (["--ranks", "0", "train.py"], "ranks=0: expected an integer from 1 to 64"),
    (["--resume", "train.py"], "--resume: expected runs/tune/measured.json of an earlier run"),
    (["--seed", str(2**32), "train.py"], f"seed={2**32}: expected an integer from 0 to 2**32 - 1"),
    (["--only", "prefetsch", "train.py"], "'prefetsch' names no candidate; expected some of prefetch, "),
    (["--device", "tpu", "train.py"], "device='tpu': expected 'auto', 'cpu' or 'cuda'"),
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
    rows = [{"name": "fused", "why": "kept"}, {"name": "no-bias", "why": "no gain"}]
    results = {"chosen": {"settings": ["fused"]}, "candidates": rows}
    assert Answer(("fused",), ("no-*",), {"no-bias": "no gain"}).differs(results) == ""
    assert Answer(("lean", "c*")).differs(results) == "expected one of lean, c*"
    assert Answer((), ("*",)).differs(results) == "fused does not help here"
    assert "expected: not tried" in Answer((), (), {"no-bias": "not tried"}).differs(results)
