"""The order of trials depends on what a setting usually saves and where the script spends its time."""

import pytest

from lightning_turbo.tune.candidates import (
    Baseline,
    combine,
    list_candidates,
    list_rank_candidates,
    select,
    usual_saving,
    why_not,
)

TABLE = {each.name: each for each in list_candidates(2)}


def baseline(**changes):
    given = {"step_ms": 10.0, "one_batch_ms": 10.0, "loader_ms": 0.1, "batches": 100, "num_workers": 2}
    phases = {"forward": 3e-3, "backward": 5e-3, "optimizer": 1e-3}
    return Baseline(**{**given, "phases": phases, **changes})


def first(found, half=True):
    able = [each for each in TABLE.values() if not why_not(each, found)]
    return max(able, key=lambda each: usual_saving(each, found, half)).name


@pytest.mark.parametrize(("found", "names"), [
    (baseline(), {"bf16-mixed", "O1", "O2"}),
    (baseline(phases={"forward": 1e-3, "backward": 1e-3, "optimizer": 8e-3}), {"fused"}),
    (baseline(loader_ms=9.0), {"prefetch", "workers-1", "workers-1-persistent"}),
    (baseline(border_ms=4000.0), {"persistent-workers", "workers-1-persistent", "workers-2-persistent"}),
])  # fmt: skip
def test_candidates_for_the_slowest_part_are_tried_first(found, names):
    assert first(found) in names


def test_half_precision_is_tried_late_without_hardware_support():
    assert first(baseline(lacks=("cuda",)), half=False) == "channels-last"


@pytest.mark.parametrize(("lacks", "name", "why"), [
    (("new workers",), "persistent-workers", "no worker processes are started again in each epoch"),
    (("dataloader",), "persistent-workers", "the training loader is not a DataLoader"),
    (("cuda",), "pin-memory", "it needs a CUDA device"),
    (("not pinned",), "pin-memory", "the loader pins its memory already"),
    ((), "persistent-workers", ""),
    ((), "pin-memory", ""),
])  # fmt: skip
def test_settings_of_the_loader_need_a_reason(lacks, name, why):
    assert why_not(TABLE[name], baseline(lacks=lacks)) == why


def test_a_static_graph_is_not_tried_with_gradient_accumulation():
    (graph,) = select(list_rank_candidates(4, 2), ["static-graph"])
    assert why_not(graph, baseline(accumulate=1)) == ""
    assert why_not(graph, baseline(accumulate=2)).startswith("gradients are accumulated")


def test_the_time_of_an_epoch_is_the_sum_of_its_parts():
    assert baseline().epoch_ms == 1000.0
    assert baseline(border_ms=500.0, validation_ms=300.0).epoch_ms == 99 * 10.0 + 800.0
    assert baseline(batches=None).epoch_ms is None


def test_settings_of_the_loader_are_tried_together():
    settings = combine([TABLE["persistent-workers"], TABLE["pin-memory"], TABLE["fused"]])
    assert settings.loader == {"persistent_workers": True, "pin_memory": True}
    assert settings.callbacks == {"FusedOptimizers": {}}
