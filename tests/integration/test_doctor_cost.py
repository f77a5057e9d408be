"""The Doctor afterwards: it leaves the Trainer, costs nothing in any later step, and keeps nothing."""

import gc
import os
import sys
import weakref

import torch
from lightning.pytorch import Callback

import lightning_turbo
from lightning_turbo import Doctor
from tests.integration.doctor_runs import QUIET, SHORT, trained

pytestmark = QUIET


class Hooks(Callback):
    """Looks at the Trainer in the middle of every step."""

    def __init__(self):
        self.seen = []

    def on_before_backward(self, trainer, pl_module, loss):
        doctor = any(isinstance(each, Doctor) for each in trainer.callbacks)
        modes = torch._C._len_torch_function_stack()
        self.seen.append((doctor, modes, sys.getprofile() is not None, type(trainer.profiler).__name__))


def test_it_takes_itself_out_after_its_steps():
    hooks, doctor = Hooks(), Doctor(**SHORT)
    before = sys.getprofile()
    trained(hooks, doctor)
    assert sys.getprofile() is before
    timing, watching, gone = hooks.seen[:3], hooks.seen[3:6], hooks.seen[6:]
    assert set(timing) == {(True, 0, False, "Recorder")}
    assert set(watching) == {(True, 1, True, "Recorder")}
    assert set(gone) == {(False, 0, False, "PassThroughProfiler")}
    assert len(gone) == 6


def test_no_memory_is_kept():
    kept = []

    class Remembers(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            kept.append(weakref.ref(batch[0]))

    doctor = Doctor(**SHORT)
    module = trained(doctor, Remembers())
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert doctor.report is not None
    assert reference() is None
    assert [each for each in kept if each() is not None] == []


HEAVY = {"Session", "Watch", "CallTable", "Sources", "Origins", "_Functions"}
HERE = os.path.join(os.path.dirname(lightning_turbo.__file__), "doctor") + os.sep


class Calls(Callback):
    """Counts the calls of the doctor's functions in each step, with the interpreter's own profile function."""

    def __init__(self, first):
        self.first, self.steps = first, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.stop()
        if trainer.global_step >= self.first:
            self.steps.append([])
            sys.setprofile(self.note)

    def on_train_end(self, trainer, pl_module):
        self.stop()

    def stop(self):
        if sys.getprofile() == self.note:  # and not the doctor's
            sys.setprofile(None)

    def note(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            self.steps[-1].append(frame.f_code.co_name)


def test_no_function_of_the_doctor_is_called_after_its_steps():
    calls = Calls(first=8)  # with the step in which the epoch ends, to which Lightning holds the profiler it began with
    trained(calls, Doctor(**SHORT), max_epochs=2)
    assert len(calls.steps) == 16
    last = {"profile", "_end", "mark", "<listcomp>", "_current"}
    assert [set(step) for step in calls.steps] == [set()] * 3 + [last] + [set()] * 12


def test_the_counter_sees_the_doctor_at_work():
    calls = Calls(first=0)
    trained(calls, Doctor(warmup=1, timed=20, watched=2))
    assert all({"on_train_batch_end", "_begin", "_end", "mark"} <= set(step) for step in calls.steps[2:])


def test_what_it_measured_with_is_gone_before_the_epoch_is_over():
    alive = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx in (4, 7, 11):
                gc.collect()
                own = {type(each) for each in gc.get_objects() if "turbo.doctor." in str(type(each).__module__)}
                alive.append({cls.__name__ for cls in own} & HEAVY)

    trained(Looks(), Doctor(**SHORT))
    watching, gone, still = alive
    assert len(watching) >= 6
    assert gone == still == set()
