"""All-reduces in two tiers: who meets whom."""

import pytest
from torch.nn import functional as F

from tests.runtime import conform, models
from toolkit.runtime import Distributed
from toolkit.runtime.hierarchy import groups
from toolkit.schedule import catalog


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


def test_a_machine_has_ranks():
    schedule = catalog.data_parallel(2)
    stages = models.cut(models.residual(), schedule)
    with pytest.raises(ValueError, match="per_machine is a number of ranks, 0 or more: got -1"):
        Distributed(stages, schedule, conform.sgd, F.cross_entropy, per_machine=-1)
