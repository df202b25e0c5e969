"""Options by their names, and which of them differ."""

import pytest

from toolkit.cli import schema
from toolkit.options import AROUND, INDIFFERENT, differing, flat, without


def test_nested_options_have_dotted_names():
    options = {"a": 1, "b": {"c": {"d": [2]}, "e": None, "none": {}}, 3: {4: 5}}
    assert flat(options) == {"a": 1, "b.c.d": [2], "b.e": None, "3.4": 5}


def test_a_group_is_left_out_with_all_that_is_in_it():
    options = {"a": 1, "a.b": 2, "ab": 3, "c.a": 4}
    assert without(options, ["a"]) == {"ab": 3, "c.a": 4}
    assert without(options, ["a.b", "c"]) == {"a": 1, "ab": 3}


def test_what_differs_has_two_values():
    options = [{"a": 1, "b": [1], "c": 0}, {"b": [1.0], "a": 2}, {"a": 2, "d": 3}]
    assert differing(options) == ["a"]
    assert differing([*options, {"d": None}]) == ["a", "d"]
    assert differing([]) == []


@pytest.mark.parametrize("name", sorted(INDIFFERENT))
def test_what_is_indifferent_is_an_option(name):
    """A misspelt one would count."""
    assert name in {*schema.options("train"), *schema.options("compare")}


def test_a_run_does_not_depend_on_what_is_around_it():
    assert AROUND < INDIFFERENT
