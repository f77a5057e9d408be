"""Formats of numbers and tables in reports."""

import io

import pytest

from lightning_turbo.measure import markdown_table, print_lines, three_digits


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (1.2345, "1.23"), (12.345, "12.3"), (123.45, "123"), (12345.6, "12346")]
)
def test_numbers_are_written_without_exponents(value, text):
    assert three_digits(value) == text


def test_the_columns_of_a_table_are_aligned():
    assert markdown_table(["setting", "factor"], [["a|b", "0.8"], ["O1", "12.3456"]]) == [
        "| setting | factor  |",
        "| ---     | ---     |",
        "| a\\|b    | 0.8     |",
        "| O1      | 12.3456 |",
    ]


@pytest.mark.parametrize(("encoding", "written"), [
    ("utf-8", "Größe \\udcff\n"), ("ascii", "Gr\\xf6\\xdfe \\udcff\n"), (None, "Größe \\udcff\n"),
])  # fmt: skip
def test_a_line_is_printed_in_any_encoding_of_the_terminal(encoding, written):
    """A file name may have bytes that are not valid characters."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding) if encoding else io.StringIO()
    print_lines("Größe \udcff", stream=stream)
    found = stream.buffer.getvalue().decode(encoding) if encoding else stream.getvalue()
    assert found == written
