"""The table of loaders that are stopped several times."""

import json

from benchmarks import stops


def test_a_row_counts_repeated_and_missing_samples(capsys):
    stops.main(["--row", "this package, a stream with its state", "1", "0"])
    found = json.loads(capsys.readouterr().out)
    assert found == {"twice": 0, "never": 0, "in_order": True, "samples": 480}
