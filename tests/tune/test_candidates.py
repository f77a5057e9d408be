"""The order of trials depends on what a setting usually saves and on where the script spends its time."""

import pytest

from lightning_turbo.errors import TurboError
from lightning_turbo.tune.candidates import NEEDS, Look, combine, list_candidates, result_of, saving, select, why_not

TABLE = {each.name: each for each in list_candidates(2)}
PHASES = {"data": 0.1, "copy": 0.0, "forward": 3.0, "backward": 5.0, "optimizer": 1.0, "hooks": 0.5, "logging": 0.4}


def look(**changes):
    """A step of ten milliseconds on a CPU, which mostly computes."""
    phases = {**PHASES, **changes.pop("phases", {})}
    given = {"lacks": ("cuda", "new workers"), "batches": 100, "period": 100, "seconds": 1.0, **changes}
    return Look(phases={name: milliseconds / 1e3 for name, milliseconds in phases.items()}, **given)


def tried(found):
    return [name for name, each in TABLE.items() if not why_not(each, found)]


def first(found, half=True):
    return max((TABLE[name] for name in tried(found)), key=lambda each: saving(each, found, half)).name


@pytest.mark.parametrize(("found", "half", "names"), [
    (look(), True, {"bf16-mixed"}),
    (look(), False, {"threads-1"}),
    (look(phases={"forward": 1.0, "backward": 1.0, "optimizer": 8.0}), True, {"fused"}),
    (look(phases={"data": 9.0}), True, {"workers-1"}),
    (look(phases={"forward": 0.2, "backward": 0.3, "hooks": 5.0}), True, {"lean"}),
    (look(seconds=20.0, lacks=("cuda",), workers=1), True, {"persistent-workers"}),
])  # fmt: skip
def test_candidates_for_the_slowest_part_are_tried_first(found, half, names):
    assert first(found, half) in names


def test_the_fast_loop_is_tried_wherever_hooks_or_logging_cost():
    """In long steps too: what counts is their share."""
    slow = {name: 1e3 * milliseconds for name, milliseconds in PHASES.items()}
    assert "lean" in tried(look(phases=slow))
    assert "lean" in tried(look(phases={"hooks": 0.0}))
    assert why_not(TABLE["lean"], look(phases={"hooks": 0.1, "logging": 0.1})) == NEEDS["loop"]


def test_what_a_gpu_decides_is_tried_on_a_gpu():
    decided = {"O1", "O2", "channels-last", "compile"}
    assert not decided & set(tried(look()))
    assert decided <= set(tried(look(device="cuda", lacks=("cpu",))))
    assert {"pin-memory", "device-prefetch"} <= set(tried(look(device="cuda", lacks=("cpu",), phases={"copy": 1.0})))
    assert "threads-1" not in tried(look(device="cuda", lacks=("cpu",)))


@pytest.mark.parametrize(("found", "name", "why"), [
    (look(), "persistent-workers", NEEDS["new workers"]),
    (look(lacks=("dataloader",)), "persistent-workers", NEEDS["dataloader"]),
    (look(lacks=(), batches=201), "persistent-workers", NEEDS["short epochs"]),
    (look(lacks=(), batches=None), "persistent-workers", NEEDS["short epochs"]),
    (look(lacks=()), "persistent-workers", ""),
    (look(), "workers-1", NEEDS["loading"]),
    (look(phases={"data": 9.0}, workers=2), "workers-2", "the loader has as many"),
    (look(phases={"data": 9.0}, workers=2), "workers-2-persistent", ""),
    (look(phases={"data": 9.0}, workers=2), "workers-2-omp-1", ""),
    (look(phases={"data": 9.0}, workers=2), "workers-1", ""),
    (look(lacks=("float32 weights",)), "bf16-mixed", NEEDS["float32 weights"]),
    (look(lacks=("optimizer",)), "fused", NEEDS["optimizer"]),
    (look(lacks=("own strategy",)), "lean", NEEDS["own strategy"]),
])  # fmt: skip
def test_a_setting_is_not_tried_without_a_reason_to(found, name, why):
    assert why_not(TABLE[name], found) == why


def test_a_step_has_its_share_of_the_validation_and_the_border():
    assert look().pace == pytest.approx(0.01)
    assert look(seconds=5.0).pace == pytest.approx(0.05)
    assert look(seconds=0.0, period=None).pace == pytest.approx(0.01)


def test_settings_are_combined():
    settings = combine([TABLE["workers-2-omp-1"], TABLE["lean"], TABLE["fused"], TABLE["bf16-mixed"]])
    assert settings.loader == {"num_workers": 2}
    assert settings.environment == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    assert settings.callbacks == {"FusedOptimizers": {}}
    assert settings.strategy == {"device_prefetch": False, "release_gradients": False, "lean": True}
    assert settings.precision == "bf16-mixed"


def test_names_of_candidates_are_checked():
    table = list_candidates(8)
    assert [each.name for each in select(table, ["workers-?"])] == ["workers-1", "workers-2", "workers-4", "workers-8"]
    assert select(table) == table
    with pytest.raises(TurboError, match="'prefetsch' names no candidate; expected some of workers-1, "):
        select(table, ["O1", "prefetsch"])


@pytest.mark.parametrize(("name", "draws", "result"), [
    ("workers-1", False, "same bits"),
    ("workers-1", True, "other maths"),
    ("workers-1", None, "same bits if loading draws nothing"),
    ("workers-2-omp-1", None, "rounding"),
    ("workers-2-persistent", None, "other maths"),
    ("prefetch-threads", True, "same bits"),
    ("lean", None, "same bits"),
])  # fmt: skip
def test_a_change_of_worker_processes_has_other_random_numbers_where_loading_draws(name, draws, result):
    assert result_of(TABLE[name], look(draws=draws)) == result
