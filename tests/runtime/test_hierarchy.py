"""All-reduces in two tiers: who meets whom."""

import pytest

from toolkit.runtime.hierarchy import groups


@pytest.mark.parametrize(
    ("ranks", "per_machine", "expected"),
    [
        (range(4), 0, [("all", (0, 1, 2, 3))]),
        (range(4), 4, [("all", (0, 1, 2, 3))]),
        (range(3), 1, [("between", (0, 1, 2))]),
        (
            range(4),
            2,
            [
                ("gather", (0, 1)),
                ("gather", (2, 3)),
                ("spread", (0, 1)),
                ("spread", (2, 3)),
                ("between", (0, 2)),
            ],
        ),
        (range(4), 3, [("gather", (0, 1, 2)), ("spread", (0, 1, 2)), ("between", (0, 3))]),
        ((1, 3, 5), 4, [("gather", (1, 3)), ("spread", (1, 3)), ("between", (1, 5))]),
    ],
)
def test_who_meets(ranks, per_machine, expected):
    assert groups(ranks, per_machine) == expected
