"""Earliest starts of ranks: the stagger of workers, in seconds."""

import pytest

from toolkit.cost.rank_starts import rank_starts
from toolkit.schedule import catalog

SECONDS = [[1.0, 3.0]] * 3  # of forwards and backwards: 12 of a micro-batch


@pytest.mark.parametrize(
    ("schedule", "speeds", "starts"),
    [
        (catalog.cyclic(3), [1.0, 1.0, 1.0], [0.0, 4.0, 8.0]),
        (catalog.cyclic(3), [1.0, 0.5, 1.0], [0.0, 8.0, 16.0]),  # of the slowest rank
        (catalog.data_parallel(3), [1.0, 0.5, 1.0], [0.0, 0.0, 0.0]),
        # Only rank 0 begins with stage 0; the others start when their inputs arrive.
        (catalog.gpipe(3, 2), [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
    ],
)
def test_workers_keep_their_stagger(schedule, speeds, starts):
    program = schedule.lower(1)
    assert rank_starts(program, schedule, 0, SECONDS, speeds) == starts
