"""Lines that are broken at the width of a terminal."""

import shlex
import sys

import pytest

from toolkit.terminal import show, show_activity, show_import, wrapped_lines


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


def test_an_import_of_torch_is_shown_once(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    show_import()
    assert "torch" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch", sys)
    show_import()
    assert capsys.readouterr().err == ""


def test_texts_end_between_words_and_commands_can_be_copied(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    text = "note: a text that is longer than a line"
    command = "try it by: cyclic-dp train 'a={b: 1, c: 2}' stages=2 microbatches=2"
    show(f"{text}\n{command}")
    assert capsys.readouterr().out == f"{text}\n{command}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(f"{text}\n{command}")
    note, note_end, *command_lines = capsys.readouterr().out.splitlines()
    assert f"{note} {note_end}" == text
    assert all(len(line) <= 30 for line in [note, note_end, *command_lines])
    assert shlex.split("\n".join(command_lines).replace("\\\n", "")) == shlex.split(
        command
    )


def test_an_indented_command_stays_indented(monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    lines = wrapped_lines("    RULE=dp torchrun x.py a=1")
    assert lines == ["    RULE=dp torchrun \\", "        x.py a=1"]
