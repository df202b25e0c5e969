"""What the pilot predicts."""

import pytest

from toolkit.cost import Hardware, unit_costs
from toolkit.plan.findings import predict
from toolkit.schedule.paper_table import schedule_of


def test_waiting_includes_latency():
    slow = Hardware("slow", 1.0, 1e9, 1e9, link_latency=1.0)
    schedules = [schedule_of("DP", 2, "per_microbatch")]
    (found,) = predict(schedules, unit_costs(2), slow, [0, 0], (1.0, 1.0))
    assert found.without_links == pytest.approx(4, rel=1e-3)
    assert found.seconds > found.without_links + 1


@pytest.mark.parametrize(
    ("placement", "more"), [("per_microbatch", (8, 8)), ("per_stage", (5, 3)), ("one", (8,))]
)
def test_devices_keep_the_optimizers_of_what_they_update(placement, more):
    schedules = [schedule_of("DP", 2, placement)]
    machine = Hardware("quick", 1.0, 1e9, 1e9)

    def memories(state):
        (found,) = predict(schedules, unit_costs(2), machine, state, (1.0, 1.0))
        return found.memories

    pairs = zip(memories([5, 3]), memories([0, 0]), strict=True)
    assert tuple(mine - without for mine, without in pairs) == more
