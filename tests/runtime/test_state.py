"""The first difference in form between two states is found."""

import pytest
import torch

from toolkit.runtime.state import difference

WHOLE = {"a": torch.zeros(2, 3), "b": [1.0, {"c": None}], "d": 3, "e": True, "f": {}}


def test_values_do_not_matter():
    found = {"a": torch.ones(2, 3), "b": [7, {"c": None}], "d": 0, "e": False, "f": {}}
    assert difference(found, WHOLE, "it") is None
    assert difference({"x": (1,)}, {"x": [2]}, "it") is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"a": torch.zeros(3, 2)}, "it['a'] is float32[3, 2], not float32[2, 3]"),
        ({"a": torch.zeros(2, 3).double()}, "it['a'] is float64[2, 3], not float32[2, 3]"),
        ({"a": None}, "it['a'] is None, not float32[2, 3]"),
        ({"b": [1.0]}, "it['b'][1]['c'] is missing, not None"),
        ({"b": "xy"}, "it['b'][0] is missing, not of type float"),
        ({"b": [1.0, {}]}, "it['b'][1]['c'] is missing, not None"),
        ({"b": [1.0, {"c": None, "x": 1}]}, "it['b'][1]['x'] is of type int, not unknown"),
        ({"b": [1.0, {"c": 0}]}, "it['b'][1]['c'] is of type int, not None"),
        ({"d": 3.0}, "it['d'] is of type float, not of type int"),
        ({"e": 1}, "it['e'] is of type int, not of type bool"),
        ({"f": None}, "it['f'] is None, not of type dict"),
    ],
)
def test_forms_do(change, fault):
    assert difference(WHOLE | change, WHOLE, "it") == fault
