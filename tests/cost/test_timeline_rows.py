"""Rows of tables about timelines."""

import pytest

from toolkit.cost.timeline_rows import in_gib
from toolkit.format import GIB


@pytest.mark.parametrize(
    ("n_bytes", "gib"),
    [
        (0, 0.0),
        (1_234_567, 0.00115),
        (0.04321 * GIB, 0.0432),
        (0.1 * GIB, 0.1),
        (12.34567 * GIB, 12.346),
        (123.4567 * GIB, 123.457),
    ],
)
def test_small_models_keep_three_digits(n_bytes, gib):
    assert in_gib(n_bytes) == gib
