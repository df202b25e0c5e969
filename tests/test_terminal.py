"""Lines that are broken at the width of a terminal."""

import pytest

from toolkit.terminal import wrapped_lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("short", ["short"]),
        ("", [""]),
        ("one two three four five", ["one two three four", "five"]),
        ("  name  a text that goes on", ["  name  a text that", "        goes on"]),
        ("    run a=1 b=[2,3] c=4", ["    run a=1 b=[2,3]", "        c=4"]),
        ("  a_name_of_16_chars a text", ["  a_name_of_16_chars", "          a text"]),
        ("a-word/that=is,longer_than_a_line", ["a-word/that=is,longer_than_a_line"]),
    ],
)
def test_lines_end_between_words(monkeypatch, line, expected):
    monkeypatch.setenv("COLUMNS", "20")
    assert wrapped_lines(line) == expected
