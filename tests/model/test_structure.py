"""Nested arguments and results as tensors in a fixed order."""

from collections import UserDict

import pytest
import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.structure import (
    Results,
    arguments,
    filled,
    input_names,
    named_tensors,
    tensors_of,
)

A, B, C = (torch.full((2,), float(k)) for k in range(3))


def names(value):
    return [(name, float(x[0])) for name, x in named_tensors(value)]


def test_dictionaries_are_sorted_and_constants_left_out():
    assert names(A) == [("", 0.0)]
    assert names((A, [B, None])) == [("0", 0.0), ("1_0", 1.0)]
    assert names({"b": B, "a": {"y": C, "x": A}, "n": 3}) == [
        ("a_x", 0),
        ("a_y", 2),
        ("b", 1),
    ]
    assert names(UserDict(b=B, a=A)) == [("a", 0.0), ("b", 1.0)]


def test_input_names_are_different_identifiers():
    valid = ["x", "input", "a_0", "größe"]
    assert input_names(valid) == valid
    assert input_names(["", "0", "1_0"]) == ["x", "input_0", "input_1_0"]
    assert input_names(["a b", "a-b", "a_b"]) == ["a_b", "a_b_1", "a_b_2"]
    assert input_names(["class", "self"]) == ["input_class", "self_1"]


def test_filled_follows_the_same_order():
    value = {"b": (A, 5), "a": [B, None]}
    found = filled(value, iter("xy"))
    assert found == {"b": ("y", 5), "a": ["x", None]}
    assert [*found] == ["b", "a"]
    left = iter(tensors_of(value))
    assert tensors_of(filled(value, left)) == tensors_of(value)


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, (A, torch.nn.Identity())])
def test_other_values_are_refused(value):
    with pytest.raises(UserError, match="expected tensors"):
        tensors_of(value)


def test_arguments():
    assert arguments(A) == ((A,), {})
    assert arguments((A, B)) == ((A, B), {})
    assert arguments([A, B]) == (([A, B],), {})
    assert [*arguments({"b": B, "a": 1})[1].items()] == [("a", 1), ("b", B)]


def is_tensor(x):
    return isinstance(x, Tensor)


@pytest.mark.parametrize("value", [A, (A, B), {"y": A, "x": [B, None, 3]}])
def test_results_are_restored(value):
    results, tensors = Results.of(value, is_tensor, "Net")
    doubled = results.restore(tuple(x + 1 for x in tensors))
    torch.testing.assert_close(results.restore(tuple(tensors)), value)
    assert results.of(doubled, is_tensor, "Net")[0] == results


@pytest.mark.parametrize(
    ("value", "match"), [((A, object()), "Net returns a object"), (None, "no tensor")]
)
def test_results_without_tensors_are_refused(value, match):
    with pytest.raises(UserError, match=match):
        Results.of(value, is_tensor, "Net")
