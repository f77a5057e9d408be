"""The command line: accepted and refused arguments, and its messages."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lightning_turbo
from lightning_turbo import cli
from lightning_turbo.errors import TurboError


def refused(capsys, *argv):
    """Run the command, check that its exit status is 2, and return its error output."""
    try:
        status = cli.main(argv)
    except SystemExit as end:  # argparse
        status = end.code
    assert status == 2
    return capsys.readouterr().err


def test_help_is_fast_because_nothing_heavy_is_imported():
    code = "import sys; from lightning_turbo import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "import lightning_turbo.__main__\n"
    code += "print([m for m in ('torch', 'lightning', 'pytorch_lightning', 'rich', 'numpy') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.splitlines()[-1] == "[]"
    assert "Find what slows down a PyTorch Lightning training script" in shown
    commands = shown.partition("commands:\n")[2].splitlines()
    described = dict(line.split(maxsplit=1) for line in commands if line.startswith("    ") and line[4] != " ")
    assert {"pack", "convert", "doctor", "tune"} == described.keys() - {"COMMAND"}


@pytest.mark.parametrize("start", [
    lambda: cli.main(["--version"]), lambda: runpy.run_module("lightning_turbo", run_name="__main__"),
], ids=["lightning-turbo", "python -m lightning_turbo"])  # fmt: skip
def test_version(capsys, monkeypatch, start):
    monkeypatch.setattr(sys, "argv", ["lightning-turbo", "--version"])
    with pytest.raises(SystemExit) as end:
        start()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lightning-turbo {lightning_turbo.__version__}\n"


@pytest.mark.parametrize("command", ["pack", "convert", "doctor", "tune"])
def test_help_shows_two_examples_that_parse(capsys, command, monkeypatch):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert len(examples) == 2
    run = []
    monkeypatch.setattr(cli, f"_{command}", lambda arguments: run.append(arguments) or 0)
    for example in examples:
        words = example.split()
        assert words[:2] == ["lightning-turbo", command]
        assert cli.main(words[1:]) == 0
    assert len(run) == 2


def test_a_misspelled_name_of_the_package_gets_a_suggestion(capsys):
    with pytest.raises(AttributeError) as error:
        lightning_turbo.ApexAmp
    sys.__excepthook__(error.type, error.value, error.tb)
    assert "Did you mean: 'ApexAMP'?" in capsys.readouterr().err  # Python reads __dir__


@pytest.mark.parametrize(("argv", "message"), [
    ((), "required: COMMAND"),
    (("tune",), "the following arguments are required: SCRIPT. Try: lightning-turbo tune --help"),
    (("bench",), "invalid choice: 'bench'"),
    (("tun",), "did you mean tune? Try: lightning-turbo --help"),
    (("pack", "a", "b", "--lables", "3"), "arguments: --lables 3; did you mean --labels? Try: lightning-turbo pack"),
    (("convert", "a", "b", "--perfix", "x"), "did you mean --prefix?"),
    (("doctor", "--minutes", "none", "train.py"), "invalid float value: 'none'"),
    (("pack", "a", "b", "--size", "224"), "size '224': expected HEIGHTxWIDTH in pixels, such as 224x224, or DEPTHx"),
])  # fmt: skip
def test_invalid_input_is_refused_with_a_message(capsys, argv, message):
    assert message in refused(capsys, *argv)


def test_pack(capsys, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        np.save(tmp_path / "scans" / name / "1.npy", np.ones((2, 3), dtype=np.float32))
    assert cli.main(["pack", "scans", "packed"]) == 0
    assert capsys.readouterr().out.startswith("packed: 2 samples, 2 classes")
    assert np.load("packed/labels.npy").tolist() == [0, 1]
    assert "packed" in refused(capsys, "pack", "scans", "packed")
    assert cli.main(["pack", "scans", "packed", "--overwrite"]) == 0


def test_pack_of_label_volumes_beside_scans(capsys, tmp_path):
    (tmp_path / "scans").mkdir()
    for name in ("a-t1", "a-t2", "a-seg"):
        np.save(tmp_path / "scans" / f"{name}.npy", np.ones((3, 3, 3), dtype=np.int16))
    assert "--pairs" in refused(capsys, "pack", "scans", "packed")
    channels = "{case}-t1.npy,{case}-t2.npy"
    assert cli.main(["pack", "scans", "packed", "--pairs", channels, "{case}-seg.npy"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 volumes with their label volumes:",
        "  a-t1.npy + a-t2.npy -> a-seg.npy",
        "packed: 1 samples with label volumes",
    ]
    Path("pairs.csv").write_text("image,label\na-t1.npy,a-seg.npy\n")
    assert cli.main(["pack", "scans", "table", "--pairs", "pairs.csv"]) == 0
    assert cli.main(["pack", "scans", "without", "--pairs", channels, "none"]) == 0
    assert cli.main(["pack", "scans", "each", "--labels", "none"]) == 0
    shapes = [np.load(f"{name}/volumes.npy").shape for name in ("packed", "table", "without", "each")]
    assert shapes == [(1, 2, 3, 3, 3), (1, 3, 3, 3), (1, 2, 3, 3, 3), (3, 3, 3, 3)]
    assert [Path(name, "labels.npy").exists() for name in ("packed", "table", "without")] == [True, True, False]
    assert "expected two patterns" in refused(capsys, "pack", "scans", "x", "--pairs", "{case}.npy", "a", "b")
    assert "expected two patterns with {case}, IMAGES" in refused(capsys, "pack", "scans", "x", "--pairs", "a", "b")
    spacing = ["pack", "scans", "x", "--labels", "none", "--spacing"]
    assert "does not apply to .npy files" in refused(capsys, *spacing, "1x1x1.5")
    assert "expected DEPTHxHEIGHTxWIDTH in mm, such as" in refused(capsys, *spacing, "1x1")


def test_pack_takes_every_option_and_shows_a_bar_with_the_time_left(capsys, tmp_path, monkeypatch):
    for name in ("scans/0.npy", "scans/1.npy", "masks/0.npy", "masks/1.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / name, np.ones((3, 3, 3), dtype=np.int16))
    (tmp_path / "scans" / "2.npy").touch()
    np.save(tmp_path / "masks" / "2.npy", np.ones((3, 3, 3)))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    seconds = iter((0.0, 1.0, 2.0, 3.0))
    monkeypatch.setattr("time.monotonic", lambda: next(seconds, 3.0))
    argv = ["pack", "scans", "out", "--labels", "masks"]
    assert "1 of 3 samples cannot be packed" in refused(capsys, *argv)
    seconds = iter((0.0, 1.0, 2.0, 3.0))
    assert cli.main([*argv, "--size", "2x2x4", "--skip-broken"]) == 0
    shown = capsys.readouterr()
    assert "1/3 files, 2 s left" in shown.err
    assert shown.out.splitlines()[-1].endswith("out.broken.txt: 1 files were skipped")
    assert np.load("out/labels.npy").shape == (2, 2, 2, 4)
    assert "mode='L' does not apply" in refused(capsys, *argv, "--overwrite", "--mode", "L")
    assert "classes=('a', 'b') does not apply" in refused(capsys, *argv, "--overwrite", "--classes", "a,b")
    assert "num_workers: expected" in refused(capsys, *argv, "--overwrite", "--compress", "2x2x2", "--workers", "-1")


@pytest.mark.parametrize(("argv", "own", "warned"), [
    (["tune", "train.py", "--minutes=3", "--epochs", "2", "--out=x"], ["--minutes=3", "--epochs", "2", "--out=x"],
     ["--minutes", "--out"]),
    (["tune", "--minutes", "3", "train.py", "fit", "--epochs", "2"], ["fit", "--epochs", "2"], []),
    (["tune", "train.py", "--", "--minutes", "3"], ["--minutes", "3"], []),
    (["tune", "-m", "train", "--help"], ["--help"], ["--help"]),
    (["doctor", "train.py", "-m", "x", "--minutes=1"], ["-m", "x", "--minutes=1"], ["-m", "--minutes"]),
    (["doctor", "train.py", "--", "--json", "x"], ["--json", "x"], []),
])  # fmt: skip
def test_arguments_after_a_script_are_its_own_and_our_options_there_warn(argv, own, warned, capsys, monkeypatch):
    Path("train.py").touch()
    given = []

    def run_tune(settings):
        given.extend(settings.arguments)
        return 0

    def examine(script, arguments, **options):
        given.extend(arguments)
        return 0

    monkeypatch.setattr("lightning_turbo.tune.command.run_tune", run_tune)
    monkeypatch.setattr("lightning_turbo.doctor.command.examine", examine)
    assert cli.main(argv) == 0
    assert given == own
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(warned), "one line, or none"
    script = argv[2] if argv[1] == "-m" else next(word for word in argv if word.startswith("train"))
    for line in lines:
        assert line.startswith(f"lightning-turbo {argv[0]}: {', '.join(warned)} went to {script}, because")
        assert line.endswith(f"lightning-turbo {argv[0]} {' '.join(warned)} ... {script}")


def test_errors_of_this_package_have_no_traceback_and_bugs_have_one(capsys, monkeypatch):
    def fail(error):
        def convert_checkpoint(*arguments, **settings):
            raise error

        monkeypatch.setattr("lightning_turbo.amp.convert.convert_checkpoint", convert_checkpoint)

    fail(TurboError("in words"))
    assert cli.main(["convert", "a", "b"]) == 2
    assert capsys.readouterr().err == "lightning-turbo: error: in words\n"
    fail(KeyboardInterrupt())
    assert cli.main(["convert", "a", "b"]) == 130
    fail(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["convert", "a", "b"])
