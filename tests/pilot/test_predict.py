"""What the pilot predicts."""

import pytest

from toolkit.cost import Hardware, unit_costs
from toolkit.pilot.predict import predict, schedule_of


def test_waiting_includes_latency():
    slow = Hardware("slow", 1.0, 1e9, 1e9, link_latency=1.0)
    schedules = [schedule_of("DP", 2, 2, "per_microbatch")]
    (found,) = predict(schedules, unit_costs(2), slow, [0, 0], (1.0, 1.0))
    assert found.without_links == pytest.approx(4, rel=1e-3)
    assert found.seconds > found.without_links + 1
