"""The search for a batch size, on a simulated machine with a memory limit."""

import math
import random
import resource

import pytest

from lightning_turbo.errors import TurboError
from lightning_turbo.measure import InterruptedRunError, new_row
from lightning_turbo.measure import worker as measured
from lightning_turbo.tune.batch_size import BatchSizes


class Machine:
    """A step takes a fixed time plus a time per sample, and a batch takes memory per sample."""

    def __init__(self, *, fits, samples=10_000, fixed=0.010, each=0.001, size=8, stop=math.inf, optimizers=("SGD",),
                 drop_last=False, limit=math.inf, start=0.0, accumulate=1, left=0.0,
                 reason="out of memory"):  # fmt: skip
        self.fits, self.fixed, self.each, self.size, self.stop = fits, fixed, each, size, stop
        self.batches = {"size": size, "samples": samples, "drop_last": drop_last, "optimizers": list(optimizers)}
        self.luck, self.calls, self.windows = random.Random(0), [], []
        self.limit, self.start, self.window = limit, start, 1
        self.accumulate, self.left, self.reason = accumulate, left, reason

    def set_pace(self, step_seconds, accumulate):
        assert 0.0 < step_seconds < math.inf
        self.windows.append(accumulate)
        self.window = accumulate

    def measure(self, configurations):
        (configuration,) = configurations  # one at a time, because two would share the memory
        size = configuration.batch_size or self.size or 8
        self.calls.append(size)
        if len(self.calls) > self.stop:
            raise InterruptedRunError
        if size > self.fits:
            return {configuration: {**new_row(), "status": "skipped", "reason": self.reason}}
        seconds = (self.fixed + self.each * size) * math.exp(self.luck.gauss(0.0, 0.01))
        rounds = [{"sweep": n, "process": 0, "seconds": seconds, "steps": 1} for n in range(4)]
        row = {**new_row(), "status": "ok", "rounds": rounds, "peak_bytes": 10**6 * size}
        whole = math.floor if self.batches["drop_last"] else math.ceil
        batches = min(self.limit, whole(self.batches["samples"] / size))
        facts = {"batches": batches, "accumulate": self.accumulate}
        # A smaller last batch takes less time. Rounds shorter than an epoch rarely contain it.
        mean = min(size, self.batches["samples"] / batches) if self.window == batches else size
        for part in rounds:
            part["seconds"] *= (self.fixed + self.each * mean) / (self.fixed + self.each * size)
            part["seconds"] += self.start / batches if self.window == batches else 0.0
        return {configuration: {**row, "numbers": {"batches": self.batches, "facts": facts}}}


def find(**settings):
    sizes = BatchSizes(Machine(**settings))
    sizes.run()
    return sizes


@pytest.mark.parametrize("fits", [8, 9, 15, 16, 100, 1000])
def test_the_largest_batch_size_that_fits_is_found_and_out_of_memory_is_a_row(fits):
    sizes = find(fits=fits)
    assert 0.87 * fits <= sizes.fitting[-1] <= fits
    assert "does not fit: out of memory" in sizes.ended
    assert "| out of memory |" in sizes.as_text()
    assert f"The largest batch that fits is {sizes.fitting[-1]}" in sizes.as_text()


@pytest.mark.parametrize(("fits", "largest"), [(1, 1), (2, 2), (3, 3), (5, 5)])
def test_the_batch_size_may_be_one(fits, largest):
    sizes = find(fits=fits, size=1)
    assert sizes.base == 1
    assert sizes.fitting[-1] == largest
    assert sizes.ended == f"{fits + 1} does not fit: out of memory"


def test_the_batch_size_is_limited_by_the_epoch():
    sizes = find(fits=10_000, samples=100)
    assert sizes.fitting == [8, 16, 32, 64]
    assert "(an epoch has 100 samples)" in sizes.as_text()
    # Batches of 64 and 36 samples, 50 per step on average. Rounds are whole epochs.
    assert sizes._seconds(64) == pytest.approx((0.010 + 0.050) / 50, rel=0.05)
    assert sizes.runner.windows[:4] == [13, 7, 4, 2]


@pytest.mark.parametrize(("settings", "windows"), [
    ({"drop_last": True}, [12, 6, 3, 1]),
    ({"limit": 5}, [5, 5, 4, 2]),
    ({"samples": 500}, [63, 32, 16, 8, 4, 2]),
    ({"samples": 2000}, [1] * 8),  # an epoch takes more than two seconds
    ({"samples": 2000, "accumulate": 4}, [4] * 8),  # the optimizer steps after every fourth
    ({"accumulate": 4}, [13, 7, 4, 2]),  # and after the last
])  # fmt: skip
def test_rounds_are_whole_epochs_if_epochs_are_short(settings, windows):
    assert find(fits=10_000, **{"samples": 100, **settings}).runner.windows[: len(windows)] == windows


@pytest.mark.parametrize("samples", [100, 250, 500, 1000, 4000])
def test_epoch_starts_do_not_favor_a_batch_size(samples):
    # The time of a step is proportional to its samples: no size is faster, with or without epoch starts in the rounds.
    assert find(fits=10_000, fixed=0.0, start=0.2, samples=samples).best == 8


def test_the_original_batch_size_is_measured_again_in_rounds_of_whole_epochs():
    sizes = find(fits=8)
    assert sizes.runner.calls[:3] == [8, 8, 16]
    assert sizes.fitting == [8]


@pytest.mark.parametrize(("optimizers", "rule"), [
    (["SGD"], "for SGD the linear rule multiplies it by 16"),
    (["AdamW"], "for AdamW the square-root rule multiplies it by 4"),
])  # fmt: skip
def test_the_fastest_batch_size_is_reported_with_the_rule_for_the_learning_rate(optimizers, rule):
    sizes = find(fits=128, optimizers=optimizers, fixed=0.1)
    assert sizes.best == 128
    assert rule in sizes.as_text()
    low, high = sizes.against[128].interval
    assert low < (0.1 / 128 + 0.001) / (0.1 / 8 + 0.001) < high < 1.0


@pytest.mark.parametrize("lost", [8, 16])
def test_failed_processes_keep_earlier_comparisons(lost):
    class Tight(Machine):
        """One size fits only in its first two processes and in the first comparison."""

        def measure(self, configurations):
            row = super().measure(configurations)
            late = self.calls.count(lost) > (3 if lost == 8 else 2) and self.calls[-1] == lost
            return {configurations[0]: {**new_row(), "status": "failed", "reason": "killed"}} if late else row

    sizes = BatchSizes(Tight(fits=16))
    sizes.run()
    (comparison,) = sizes.against.values()
    assert len(comparison.logs) == 1
    # Time per sample: a step takes 0.010 s plus 0.001 s per sample.
    assert comparison.ratio == pytest.approx((0.026 / 16) / (0.018 / 8), rel=0.05)


def test_the_original_batch_size_stays_if_no_other_is_faster_per_sample():
    sizes = find(fits=64, fixed=0.0)
    assert sizes.best == 8
    assert "None is faster a sample than the script's 8 beyond noise." in sizes.as_text()


@pytest.mark.parametrize("stop", [1, 3, 9])
def test_measurements_are_reported_when_the_time_is_over(stop):
    sizes = find(fits=64, stop=stop)
    assert len(sizes.fitting) == {1: 1, 3: 2, 9: 4}[stop]
    assert ("(the time was over)" in sizes.as_text()) == (stop < 9)
    assert ("They were not compared with one another." in sizes.as_text()) == (stop > 1)
    assert "None is faster" not in sizes.as_text()


@pytest.mark.parametrize("stop", [1, 3])
def test_after_ctrl_c_the_report_does_not_say_that_the_time_was_over(stop):
    assert "(the search was ended)." in find(fits=64, stop=stop, left=60.0).as_text()
    with pytest.raises(KeyboardInterrupt):
        find(fits=64, stop=0, left=60.0)


def test_a_loader_whose_batches_cannot_be_resized_is_refused_at_once():
    class Own(Machine):
        """The loader has a custom batch sampler, which is detected when its size is changed."""

        def measure(self, configurations):
            self.fits = 0 if configurations[0].batch_size else 8
            return super().measure(configurations)

    machine = Own(fits=8, reason="its training loader has no BatchSampler of torch.")
    with pytest.raises(TurboError, match=r"^the batch size cannot be changed: .* no BatchSampler of torch\.$"):
        BatchSizes(machine).run()
    assert len(machine.calls) == 2


def test_only_out_of_memory_counts_as_a_batch_size_that_does_not_fit():
    assert find(fits=8, reason="torch cannot trace this network").ended == "9 fails: torch cannot trace this network"


def test_a_script_without_a_batch_size_is_refused():
    with pytest.raises(TurboError, match="expected a training DataLoader with a batch_size"):
        find(fits=8, size=None)
    with pytest.raises(TurboError, match="the time was over"):
        find(fits=8, stop=0)


def test_a_process_is_limited_to_the_free_memory(monkeypatch, tmp_path):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    monkeypatch.setattr(measured.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measured, "_free_bytes", lambda: 1000)
    before = measured._status("VmData")
    measured.limit_memory(0.9)
    ((soft, _),) = limits
    assert abs(soft - before - 900) < 2**26
    monkeypatch.undo()
    assert 0 < measured._free_bytes() < 2**50


def test_the_file_cache_of_a_container_counts_as_free_memory(monkeypatch, tmp_path):
    for name, text in {
        "memory.max": "16000\n", "memory.current": "15000\n", "memory.stat": "anon 2000\ninactive_file 9000\n",
        "meminfo": "MemTotal: 64 kB\nMemAvailable: 48 kB\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(measured, "GROUP", tmp_path)
    monkeypatch.setattr(measured, "MEMORY", tmp_path / "meminfo")
    assert measured._free_bytes() == 10_000
    (tmp_path / "memory.max").write_text("max\n")
    assert measured._free_bytes() == 48 * 1024
