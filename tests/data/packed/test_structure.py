"""The structure of a sample, through JSON and back."""

import json

import pytest

from lightning_turbo.data.packed.structure import build, from_json, names_in, split_batch, to_json

STRUCTURES = [
    "x",
    ("x",),
    ["x"],
    {"a": ("x", ["y", {}]), "b": []},
    {0: "x", "0": "y", 0.5: {True: ["z"]}},
    {"<list>": "x"},
    {"<dict>": ["x"], "<list>": ("y",)},
    (),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_a_structure_comes_back(structure):
    found = from_json(json.loads(json.dumps(to_json(structure))))
    assert repr(found) == repr(structure)
    parts = {name: name.upper() for name in names_in(structure)}
    assert repr(build(found, parts)) == repr(structure).replace("'x'", "'X'").replace("'y'", "'Y'").replace(
        "'z'", "'Z'"
    )


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_a_batch_is_split_into_samples_of_its_structure(structure):
    batch = build(structure, {name: [f"{name}{n}" for n in range(3)] for name in names_in(structure)})
    # A list of rows is a part here, not a structure.
    rows = list(split_batch(build(structure, {name: _Rows(name) for name in names_in(structure)}), 3))
    assert len(rows) == 3
    assert [repr(row) for row in rows] == [
        repr(build(structure, {name: f"{name}{n}" for name in names_in(structure)})) for n in range(3)
    ]
    assert batch is not None


class _Rows:
    def __init__(self, name):
        self.name = name

    def __iter__(self):
        return iter([f"{self.name}{n}" for n in range(3)])
