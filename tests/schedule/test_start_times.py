"""Messages of a sharded state go little before their place: a rank holds its share."""

import pytest

from toolkit.schedule import catalog
from toolkit.schedule.start_times import lookahead


@pytest.mark.parametrize(
    ("schedule", "ticks"),
    [
        (catalog.cyclic(4, 1), 16),
        (catalog.gpipe(3, 8), 12),
        (catalog.zero_bubble(3, 8), 12),
        (catalog.cyclic(3, n_stages=4), 48),  # workers are 8 / 3 slots apart: three ticks a slot
        (catalog.cyclic(4, 1, state="sharded"), 2),
        (catalog.cyclic(9, state="sharded"), 2),
        (catalog.data_parallel(4, state="sharded"), 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_ticks(schedule, ticks):
    assert lookahead(schedule) == ticks
