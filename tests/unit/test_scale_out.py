"""examples/scale_out.py: the plans are right, and the table of docs/scale-out.md is theirs."""

import math
from pathlib import Path

import pytest

import lightning_turbo
from examples.scale_out import GPUS, Setup, main, plan, stops_paying, table, updated

PAGE = Path(lightning_turbo.__file__).parent.parent / "docs" / "scale-out.md"


def test_the_table_of_the_page_is_current():
    assert updated(PAGE.read_text(), Setup()) == PAGE.read_text(), (
        "run python -m examples.scale_out --write docs/scale-out.md"
    )
    assert GPUS[-1] == 4096


def test_batch_accumulation_and_bytes():
    setup = Setup(parameters=1e6, batch=16, least=64, most=256)
    rows = {n: plan(n, setup) for n in (1, 2, 4, 16, 32, 256, 512)}
    assert rows[512] is None
    shapes = {n: (row.per_gpu, row.accumulate, row.batch) for n, row in rows.items() if row}
    assert shapes == {
        1: (16, 4, 64), 2: (16, 2, 64), 4: (16, 1, 64), 16: (16, 1, 256), 32: (8, 1, 256), 256: (1, 1, 256)
    }  # fmt: skip
    assert rows[1].sent == (0.0, 0.0)
    assert rows[4].sent == (2 * 3 / 4 * 4e6, 2 * 3 / 4 * 2e6)


def test_the_exchange_by_hand():
    """Two GPUs, two buckets of 4 MB, 8 GB/s, no latency to speak of: each bucket takes 0.5 ms."""
    setup = Setup(
        parameters=2e6, batch=1, least=2, most=2, sample_ms=3.0, inside=8e9, latency=1e-12, bucket=4e6, machine=2
    )
    row = plan(2, setup)
    # Backward takes 2 ms, buckets are ready at 1 and 2 ms: the second sticks out, 0.5 ms of 1 ms.
    assert row.hidden[0] == pytest.approx(0.5)
    assert row.efficiency[0] == pytest.approx(3.0 / 3.5)
    assert row.efficiency[1] == pytest.approx(3.0 / 3.25)
    # Backward of 0.2 ms: the first is ready at 0.1 ms, the second waits for it; 1.1 - 0.2 ms stick out.
    short = plan(2, Setup(**{name: getattr(setup, name) for name in Setup.__slots__} | {"sample_ms": 0.3}))
    assert short.hidden[0] == pytest.approx(0.1)
    # Accumulation hides nothing more, and spreads the rest over its batches.
    four = plan(2, Setup(**{name: getattr(setup, name) for name in Setup.__slots__} | {"least": 8, "most": 8}))
    assert four.efficiency[0] == pytest.approx(12.0 / 12.5)


def test_between_machines_the_network_is_the_narrowest_link():
    inside, between = plan(8, Setup()), plan(16, Setup())
    assert between.efficiency[0] < inside.efficiency[0]
    assert plan(16, Setup(between=1e15)).efficiency[0] == pytest.approx(inside.efficiency[0], abs=0.01)


def test_where_it_stops_paying():
    rows = [plan(n, Setup()) for n in GPUS]
    end = stops_paying(rows, Setup())
    speed = {row.gpus: row.gpus * row.efficiency[1] for row in rows}
    assert speed[end] < 1.5 * speed[end // 2]
    assert all(speed[n] >= 1.5 * speed[n // 2] for n in GPUS if n // 2 in speed and n < end)
    assert stops_paying(rows[:5], Setup()) is None
    assert "Up to here, twice as many" in table(Setup(), GPUS[:5])
    assert "128 GPUs would have less than a sample each" in table(Setup(most=64, least=64), (8, 16, 128))


def test_the_command(capsys, tmp_path):
    assert main(["--gpus", "4", "2", "--parameters", "1e6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["2", "4"]
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="expected a page with the lines"):
        main(["--write", str(page)])
    with pytest.raises(SystemExit, match="No such file"):
        main(["--write", str(tmp_path / "nowhere.md")])
    for words, message in (
        (["--batch", "0"], "expected a number above 0"),
        (["--batch", "1.5"], "expected an integer above 0"),
        (["--sample-ms", "fast"], "expected a number above 0"),
        (["--least", "512", "--most", "256"], "expected least <= most"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err


def test_the_numbers_in_the_text_are_the_defaults():
    text, setup = " ".join(PAGE.read_text().split()), Setup()
    assert f"{setup.parameters / 1e6:g} million parameters, {setup.sample_ms:g} ms" in text
    assert math.isclose(1000 / setup.sample_ms, 2470, rel_tol=0.001)
    assert f"{setup.inside / 1e9:g} GB/s from GPU to GPU in it and {setup.between / 1e9:g} GB/s" in text
    assert f"{setup.latency * 1e6:g} us a hop, buckets of {setup.bucket / 2**20:g} MiB" in text
    assert f"for {setup.least} samples and batches up to {setup.most:,}" in text
