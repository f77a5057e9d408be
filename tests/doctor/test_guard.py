"""An error of the Doctor or of a rule does not end a run: one line reports it, and training continues."""

import sys
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_turbo import Doctor
from lightning_turbo.doctor import guard
from tests.children import status_of_child
from tests.integration.doctor_runs import Noisy, trained

SHORT = {"warmup": 1, "timed": 2, "watched": 2}


@pytest.fixture
def contained(monkeypatch):
    """Contains errors, as for users."""
    monkeypatch.setattr(guard, "RAISES", False)


def fails(*given, **more):
    raise KeyError("'monitor'")


PLACES = {
    "the start": "session.Session.__init__",
    "the start of fit": "session.Timeline",
    "a look at a batch": "collect.batch_facts",
    "between two steps": "session.Session.step_seconds",
    "the lines": "session.lines_of",
    "in a call of torch": "watch.find_tensors",
    "after a call of torch": "watch.StepWatch._judge_by_name",
    "in a call of Python": "watch.StepWatch._note_python",
    "after a watched step": "retention.Retention.measure",
    "the facts": "collect.run_facts",
    "the text": "callback.as_text",
}


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_doctor_is_one_line_and_does_not_change_the_run(place, monkeypatch, capsys):
    alone = trained(max_epochs=2)
    doctor = Doctor(**SHORT)
    monkeypatch.setattr(f"lightning_turbo.doctor.{PLACES[place]}", fails)
    module = trained(doctor, max_epochs=2)
    assert module.losses == alone.losses
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if "KeyError" in line)
    assert "Training goes on without it" in line
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)
    assert type(module.trainer.profiler).__name__ == "PassThroughProfiler"


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_doctor_ends_a_script_as_the_report_would(place, monkeypatch, tmp_path, capfd):
    (tmp_path / "last").write_text("of a long run")

    class Saves(Noisy):
        def on_fit_end(self):
            (tmp_path / "last").write_text("of some steps")

    monkeypatch.setattr(f"lightning_turbo.doctor.{PLACES[place]}", fails)
    doctor = Doctor(**SHORT, stop=True)
    assert status_of_child(lambda: trained(doctor, model=Saves, max_epochs=2)) == 1
    assert "The program is ended, as it would be after the report." in capfd.readouterr().out
    assert (tmp_path / "last").read_text() == "of a long run"


@pytest.mark.usefixtures("contained")
def test_a_failing_rule_is_named_and_the_others_report(monkeypatch, capsys):
    from lightning_turbo.doctor.rules import RULES

    broken = next(each for each in RULES if each.name == "host-sync")
    monkeypatch.setattr(type(broken), "findings", lambda self, facts: fails() if self is broken else [])
    trained(doctor := Doctor(**SHORT))
    assert doctor.report is not None
    assert "the rule 'host-sync' found nothing, because of KeyError" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["collect.run_facts", "rules.rule.Rule.findings"])
def test_errors_of_the_doctor_are_raised_in_the_tests_of_this_project(place, monkeypatch):
    monkeypatch.setattr(f"lightning_turbo.doctor.{place}", fails)
    with pytest.raises(KeyError):
        trained(Doctor(**SHORT))


class Keyed(Callback):
    """With its arguments in its state key, as in Lightning's documentation."""

    def __init__(self, every):
        self.every = every

    @property
    def state_key(self):
        return self._generate_state_key(every=self.every)

    def on_train_batch_end(self, *given):
        time.sleep(0.02)


class Percent(Keyed):
    @property
    def state_key(self):
        return "Percent{share}%s%(x)d{}"


@pytest.mark.parametrize("kind", [Keyed, Percent])
def test_a_hook_is_named_with_any_state_key_of_its_callback(kind):
    trained(kind({"a": None}), doctor := Doctor(**SHORT))
    found = " ".join(each.what for each in doctor.report.findings)
    assert "on_train_batch_end" in found


@pytest.mark.usefixtures("contained")
def test_errors_of_the_user_are_not_contained():
    class Ends(Noisy):
        def on_train_batch_end(self, *given):
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        trained(Doctor(**SHORT), model=Ends)
