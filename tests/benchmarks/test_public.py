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

PROMISE = {
    "settings": ["lean", "fused"], "of": "epochs", "steps": 600, "factor": 1.5, "interval": [1.42, 1.58],
    "pairs_seconds": [[12.0, 8.0], [13.0, 8.5], [11.0, 7.5]],
}  # fmt: skip
ONCE = {"chosen": {"settings": ["lean", "fused"]}, "promise": PROMISE, "verdict": "in words", "other_cores": 0.2}
FOUND = {**ONCE, "second": ONCE}
NOTHING = {
    "chosen": {"settings": []}, "promise": {"factor": None, "interval": None}, "verdict": "nothing helps here",
}  # fmt: skip


def again(**changes):
    return {**ONCE, "second": {**ONCE, "promise": {**PROMISE, **changes}}}


def test_a_row_compares_the_promise_with_a_second_run():
    assert public.row("gan", FOUND) == [
        "`gan`", "lean + fused", "1.42, 1.50 (1.42-1.58)", "whole epochs (600 steps)", "12.0, 8.00", "1.50 (1.42-1.58)",
        "11 %", "yes",
    ]  # fmt: skip
    assert public.row("gan", again(factor=1.41, interval=[1.3, 1.5]))[5:] == ["1.41 (1.30-1.50)", "11 %", "no"]
    assert public.row("gan", again(factor=None, interval=None))[5:] == ["", "11 %", "in words"]
    steps = {**ONCE, "promise": {**PROMISE, "of": "steps", "steps": 120}}
    assert public.row("gan", steps)[3:] == ["120 steps", "12.0, 8.00", "", "11 %", ""]
    assert public.row("gan", NOTHING) == ["`gan`", "nothing helps here", "", "", "", "", "", ""]
    undecided = {**NOTHING, "promise": PROMISE, "verdict": "undecided"}
    assert public.row("gan", undecided)[1:] == ["undecided", "", "", "", "", "11 %", ""]
    assert public.row("gan", {"error": "tune ended with exit status 2"})[1] == "tune ended with exit status 2"
    wide = again(factor=1.3)
    wide["promise"] = {**PROMISE, "interval": [1.4, 1.8]}
    text = "\n".join(public.page({"gan": FOUND, "svi": wide, "hydra": NOTHING}, 2.0))
    assert re.search(r"promised in 1 of 2\b.*15 % in 1 of 2\b", text, re.DOTALL)


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
    return Script(**where, **own, license="MIT", trains="nothing", arguments=("--rate", "1"))


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
        (out / "tune.json").write_text(json.dumps(ONCE))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(public.subprocess, "run", record)
    monkeypatch.setitem(SCRIPTS, "gan", repository)
    page = tmp_path / "page.md"
    words = ["--repositories", str(tmp_path / "clones"), "--page", str(page), "--minutes", "0.5", "--only", "gan"]
    assert public.main([*words, "--out", str(tmp_path / "kept")]) == 0
    assert len(ran) == (2 if status == 0 else 1)
    for (command, environment, text), only in zip(ran, (public.SETTINGS, "lean,fused"), strict=False):
        assert text == "the first"
        assert command[-3:] == ["deep/train.py", "--rate", "1"]
        assert command[command.index("--minutes") + 1] == "0.5"
        assert command[command.index("--only") + 1] == only
        assert environment["PL_TRAINER_LIMIT_TRAIN_BATCHES"] == "5"
    assert ("lean + fused" in page.read_text()) == (status == 0)
    assert ("exit status 2" in page.read_text()) == (status == 2)


def test_downloads_of_a_script_are_refused():
    with pytest.raises(HTTPError) as caught:
        offline.refuse("https://example.invalid/weights", "weights")
    caught.value.close()
