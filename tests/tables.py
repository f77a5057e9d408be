"""Tables of cases: of a product of several arguments, the short form takes each pair of values of two arguments."""

import itertools

import pytest


def covering(sizes):
    """Return few rows of numbers below ``sizes``, so that each pair of numbers of two columns is in a row.

    Each new row begins with the first pair that no row has yet, and takes in each other column the number with which it
    has the most such pairs.
    """
    columns = range(len(sizes))
    missing = {
        (one, a, other, b)
        for one, other in itertools.combinations(columns, 2)
        for a, b in itertools.product(range(sizes[one]), range(sizes[other]))
    }
    rows = []
    while missing:
        one, a, other, b = min(missing)
        row = {one: a, other: b}
        for column in sorted(set(columns) - set(row), key=lambda column: -sizes[column]):
            row[column] = max(range(sizes[column]), key=lambda number: len(missing & _pairs({**row, column: number})))
        missing -= _pairs(row)
        rows.append(tuple(row[column] for column in columns))
    return rows


def _pairs(row):
    return {(one, row[one], other, row[other]) for one, other in itertools.combinations(sorted(row), 2)}


def every_pair(names, *axes):
    """Parametrize by all combinations, and mark those ``slow`` that the short form does not need for its pairs."""
    short = set(covering([len(axis) for axis in axes]))
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        parts = [axis[place] for axis, place in zip(axes, places, strict=True)]
        parts = [part if hasattr(part, "marks") else pytest.param(part) for part in parts]
        marks = [mark for part in parts for mark in part.marks] + [pytest.mark.slow] * (places not in short)
        cases.append(pytest.param(*(part.values[0] for part in parts), marks=marks))
    return pytest.mark.parametrize(names, cases)
