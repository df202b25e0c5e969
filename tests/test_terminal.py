"""Lines that are broken at the width of a terminal."""

import sys

import pytest

from toolkit.terminal import show_activity, wrapped_lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("short", ["short"]),
        ("", [""]),
        ("one two three four five", ["one two three four", "five"]),
        ("  name  a text that is long", ["  name  a text that", "        is long"]),
        ("    run a=1 b=[2,3] c=4", ["    run a=1 b=[2,3]", "        c=4"]),
        ("  a_name_of_16_chars a text", ["  a_name_of_16_chars", "          a text"]),
        ("a-word/that=is,longer_than_a_line", ["a-word/that=is,longer_than_a_line"]),
    ],
)
def test_lines_end_between_words(monkeypatch, line, expected):
    monkeypatch.setenv("COLUMNS", "20")
    assert wrapped_lines(line) == expected


def test_activities_are_shown_on_a_terminal_by_the_first_rank(monkeypatch, capsys):
    show_activity("hidden in a file")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_activity("reading")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    show_activity("hidden on another rank")
    assert capsys.readouterr() == ("", "reading ...\n")
