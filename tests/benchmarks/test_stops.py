"""The table of loaders that are stopped several times."""

import json

from benchmarks import stops


def test_a_row_is_tried_and_a_table_is_printed(capsys):
    stops.main(["--row", "this package, a stream with its state", "1", "0"])
    found = json.loads(capsys.readouterr().out)
    assert found == {"twice": 0, "never": 0, "in_order": True, "samples": 480}
    assert stops.main(["--only", "nothing"]) == 0
    assert "| Loader | 1 stop, 0 workers | 3 stops, 0 workers |" in capsys.readouterr().out
