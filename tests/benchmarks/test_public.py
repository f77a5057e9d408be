"""The table of public scripts: its verdicts, and that a script is tuned at its commit."""

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError

import pytest

from benchmarks import offline, public
from benchmarks.public import SCRIPTS, Script

EPOCHS = {
    "default": {"seconds": 12.0}, "chosen": {"seconds": 8.0}, "factors": [1.45, 1.5, 1.55], "factor": 1.5,
    "interval": [1.42, 1.58], "promised": 1.44, "expected": [1.3, 1.6],
    "promised_epochs": True,
}  # fmt: skip
FOUND = {"chosen": {"settings": ["lean", "fused"], "ratio": 0.5, "interval": [0.4, 0.625]}, "epochs": EPOCHS}
FOUND |= {"other_cores": 0.2}
NOTHING = {"chosen": {"settings": [], "ratio": None, "interval": None}, "verdict": "nothing helps here"}


def test_a_row_compares_the_promise_with_the_measured_interval():
    assert public.row("gan", FOUND) == [
        "`gan`", "lean + fused", "1.44 (1.30-1.60)", "12.0, 8.00", "1.50 (1.42-1.58)", "3", "11 %", "yes",
    ]  # fmt: skip
    other = {**FOUND, "epochs": {**EPOCHS, "interval": [1.45, 1.8]}}
    assert public.row("gan", other)[4:] == ["1.50 (1.45-1.80)", "3", "23 %", "no"]
    one = {**FOUND, "epochs": {**EPOCHS, "factors": [1.5], "interval": None}}
    assert public.row("gan", one)[4:] == ["1.50", "1", "", "one pair"]
    steps = {**FOUND, "epochs": {**EPOCHS, "promised_epochs": False}}
    assert public.row("gan", steps)[-1] == "of steps alone"
    assert public.row("gan", NOTHING) == ["`gan`", "nothing helps here", "", "", "", "", "", ""]
    failed = {**FOUND, "epochs": {"default": {"seconds": 12.0}, "error": "chosen failed: no data"}}
    assert public.row("gan", failed)[3:] == ["12.0", "", "", "", "chosen failed: no data"]
    assert public.row("gan", {"error": "tune ended with exit status 2"})[1] == "tune ended with exit status 2"
    text = "\n".join(public.page({"gan": FOUND, "svi": other, "hydra": NOTHING}, 2.0))
    assert re.search(r"promise in 1 of 2\b.*15 % in 1 of 2\b", text, re.DOTALL)


@pytest.fixture
def repository(tmp_path):
    """A repository whose newest commit is not that of the table."""
    clone = tmp_path / "clones" / "theirs"
    (clone / "deep").mkdir(parents=True)

    def commit(text):
        (clone / "deep" / "train.py").write_text(text)
        options = ["-c", "user.name=a", "-c", "user.email=a", "-c", "commit.gpgsign=false"]
        for words in (["init", "-q"], ["add", "."], [*options, "commit", "-qm", "a"]):
            subprocess.run(["git", "-C", str(clone), *words], check=True)
        asked = ["git", "-C", str(clone), "rev-parse", "HEAD"]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()

    first = commit("the first")
    commit("the second")
    own: dict = {"trainer": {"limit_train_batches": 5}, "data": {"data": public.write_words}}
    where = {"repository": "owner/theirs", "commit": first, "path": "deep/train.py"}
    return Script(**where, **own, license="MIT", trains="nothing", setting="lean", arguments=("--rate", "1"))


@pytest.mark.parametrize("status", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_is_tuned_in_its_own_folder_at_its_commit(repository, tmp_path, monkeypatch, status):
    ran, run = [], subprocess.run

    def record(command, **options):
        if command[0] != sys.executable:
            return run(command, **options)
        folder = options["cwd"]
        ran.append((command, options["env"], (folder / "deep" / "train.py").read_text()))
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True, exist_ok=True)
        (out / "tune.json").write_text(json.dumps(FOUND))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(public.subprocess, "run", record)
    monkeypatch.setitem(SCRIPTS, "gan", repository)
    page = tmp_path / "page.md"
    words = ["--repositories", str(tmp_path / "clones"), "--page", str(page), "--minutes", "0.5", "--only", "gan"]
    assert public.main([*words, "--out", str(tmp_path / "kept")]) == 0
    ((command, environment, text),) = ran
    assert text == "the first"
    assert command[-3:] == ["deep/train.py", "--rate", "1"]
    assert {"--confirm", "0.5"} < set(command)
    assert command[command.index("--only") + 1] == "lean"
    assert environment["PL_TRAINER_LIMIT_TRAIN_BATCHES"] == "5"
    assert public.main([*words, "--out", str(tmp_path / "kept"), "--resume"]) == 0
    assert len(ran) == (1 if status == 0 else 2)
    assert ("lean + fused" in page.read_text()) == (status == 0)
    assert ("exit status 2" in page.read_text()) == (status == 2)


def test_downloads_of_a_script_are_refused():
    with pytest.raises(HTTPError) as caught:
        offline.refuse("https://example.invalid/weights", "weights")
    caught.value.close()
