"""Dotted names of options, and which options differ between runs."""

import pytest

from toolkit.cli import schema
from toolkit.options import AROUND, INDIFFERENT, differing, flat, without


def test_nested_options_have_dotted_names():
    options = {"a": 1, "b": {"c": {"d": [2]}, "e": None, "none": {}}, 3: {4: 5}}
    assert flat(options) == {"a": 1, "b.c.d": [2], "b.e": None, "3.4": 5}


def test_without_removes_whole_groups():
    options = {"a": 1, "a.b": 2, "ab": 3, "c.a": 4}
    assert without(options, ["a"]) == {"ab": 3, "c.a": 4}
    assert without(options, ["a.b", "c"]) == {"a": 1, "ab": 3}


def test_differing_options_have_two_values():
    options = [{"a": 1, "b": [1], "c": 0}, {"b": [1.0], "a": 2}, {"a": 2, "d": 3}]
    assert differing(options) == ["a"]
    assert differing([*options, {"d": None}]) == ["a", "d"]
    assert differing([]) == []


@pytest.mark.parametrize("name", sorted(INDIFFERENT))
def test_indifferent_names_are_options(name):
    """A misspelt name would make runs differ."""
    assert name in {*schema.option_names("train"), *schema.option_names("compare")}


def test_runs_do_not_depend_on_options_around_them():
    assert AROUND < INDIFFERENT
