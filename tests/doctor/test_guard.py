"""No error of the Doctor, of a rule or of a name that it meets ends a run: one line says so, and training goes on."""

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
    """Errors are kept from the run, as they are for users."""
    monkeypatch.setattr(guard, "RAISES", False)


def fails(*given, **more):
    raise KeyError("'monitor'")


PLACES = {
    "the start": "session.Session.__init__",
    "the start of fit": "session.FitClock",
    "a look at a batch": "collect.batch_facts",
    "between two steps": "reads.BytesRead.end_step",
    "in a call of torch": "watch.find_tensors",
    "after a call of torch": "watch.StepWatch._judge_as_on_cuda",
    "in a call of Python": "watch.StepWatch._note_python",
    "after a watched step": "retention.Retention.measure",
    "the facts": "collect.run_facts",
    "the text": "callback.as_text",
}


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_doctor_is_a_line_and_the_run_goes_on_with_the_same_bits(place, monkeypatch, capsys):
    alone = trained(max_epochs=2)
    doctor = Doctor(**SHORT)
    monkeypatch.setattr(f"lightning_turbo.doctor.{PLACES[place]}", fails)
    module = trained(doctor, max_epochs=2)
    assert module.losses == alone.losses
    told = capsys.readouterr().out
    (line,) = (line for line in told.splitlines() if "KeyError" in line)
    assert "Training goes on without it" in line
    assert (sys.getprofile(), torch._C._len_torch_function_stack()) == (None, 0)
    assert type(module.trainer.profiler).__name__ == "PassThroughProfiler"


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_doctor_ends_a_program_that_it_was_to_end(place, monkeypatch, tmp_path, capfd):
    """Its epochs may be cut short: what it came to must not be written over the weights of a long run."""
    (tmp_path / "last").write_text("of a long run")

    class Saves(Noisy):
        def on_train_epoch_end(self):
            (tmp_path / "last").write_text("of some steps")

    monkeypatch.setattr(f"lightning_turbo.doctor.{PLACES[place]}", fails)
    doctor = Doctor(**SHORT, stop=True, border="cut")
    assert status_of_child(lambda: trained(doctor, model=Saves, max_epochs=2)) == 1
    assert "The program is ended, as it would be after the report." in capfd.readouterr().out
    assert (tmp_path / "last").read_text() == "of a long run"


@pytest.mark.usefixtures("contained")
def test_a_rule_that_fails_is_named_and_the_others_report(monkeypatch, capsys):
    from lightning_turbo.doctor.rules import RULES

    broken = next(each for each in RULES if each.name == "host-sync")
    monkeypatch.setattr(type(broken), "findings", lambda self, facts: fails() if self is broken else [])
    trained(doctor := Doctor(**SHORT))
    assert doctor.report is not None
    assert "the rule 'host-sync' found nothing, because of KeyError" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["collect.run_facts", "rules.rule.Rule.findings"])
def test_an_error_is_raised_in_this_projects_own_tests(place, monkeypatch):
    monkeypatch.setattr(f"lightning_turbo.doctor.{place}", fails)
    with pytest.raises(KeyError):
        trained(Doctor(**SHORT))


class Keyed(Callback):
    """With its arguments in its key, as Lightning's documentation has it."""

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
def test_a_hook_is_named_whatever_is_in_the_key_of_its_callback(kind):
    trained(kind({"a": None}), doctor := Doctor(**SHORT))
    told = " ".join(each.what for each in doctor.report.findings)
    assert "on_train_batch_end" in told


@pytest.mark.usefixtures("contained")
def test_what_is_no_error_of_the_doctor_passes():
    class Ends(Noisy):
        def on_train_batch_end(self, *given):
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        trained(Doctor(**SHORT), model=Ends)
