"""Pipelines that never drain, for unequal stages."""

import pytest

from toolkit.cost import UNIT, Hardware, StageCost, simulate
from toolkit.cost.affordable_delay import step_seconds
from toolkit.errors import UserError
from toolkit.plan.search_space import SearchSpace
from toolkit.plan.steady_search import search_steady
from toolkit.schedule import catalog


def stages(*forwards, **more):
    return tuple(
        StageCost(
            1, 2, activation_bytes=1, forward_seconds=x, backward_seconds=2 * x, **more
        )
        for x in forwards
    )


def space(costs, m, split_backward=False, **options):
    return SearchSpace(costs, m, split_backward=split_backward, **options)


def test_equal_stages_are_never_idle_in_the_memory_of_1f1b():
    costs = stages(*[1.0] * 4)
    found = search_steady(space(costs, 8, memory=[4.0, 4.0, 3.0, 2.0]), seconds=10)
    assert (found.seconds, found.bound, found.proven) == (24.0, 24.0, True)
    assert found.seconds == step_seconds(catalog.pipedream_2bw(4, 8), costs, UNIT)
    assert found.schedule.max_staleness == 1


@pytest.mark.parametrize("split", [False, True])
def test_unequal_stages_are_balanced_over_ranks(split):
    """Eight stages whose halves differ: the catalogue's pipelines wait for the slow ranks."""
    costs = stages(*[3.0] * 4, *[1.0] * 4)
    found = search_steady(space(costs, 8, split, ranks=4, memory=20), seconds=10)
    assert found.seconds == pytest.approx(found.bound) == 8 * 12
    pairs = stages(6.0, 6.0, 2.0, 2.0)
    assert found.seconds < 0.7 * step_seconds(catalog.pipedream_2bw(4, 8), pairs, UNIT)


def test_what_is_found_keeps_to_the_memory_and_its_versions():
    costs = stages(
        1.0, 2.0, 1.0, 2.0, parameter_bytes=0.5, input_bytes=0.25, output_bytes=0.25
    )
    hardware = Hardware("slow", 1, 100, 10, link_latency=0.1, speeds=(1, 2))
    found = search_steady(
        space(costs, 6, ranks=2, hardware=hardware, memory=9.0), seconds=10
    )
    timeline = simulate(found.schedule.lower(12).verify(), costs, hardware)
    assert max(timeline.peak_memory(rank) for rank in range(2)) <= 9.0
    assert found.bound <= found.seconds
    assert found.schedule.staleness == ((1,) * 6,) * 4


def test_less_memory_takes_more_time():
    costs = stages(1.0, 2.0, 3.0, 1.0)
    times = [
        search_steady(space(costs, 6, memory=room), seconds=5).seconds
        for room in (1, 4)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == 6 * 9


def test_mistakes():
    with pytest.raises(
        UserError, match=r"stages \[0\] with one micro-batch take 1 bytes of rank 0"
    ):
        search_steady(space(stages(1.0, 1.0), 2, memory=0.5))
    with pytest.raises(
        UserError, match="no pipeline with delay 1 was found in a memory of"
    ):
        search_steady(space(stages(*[1.0] * 12), 12, memory=1), seconds=1)
    with pytest.raises(UserError, match="each of 3 ranks runs a stage: got 2"):
        space(stages(1.0, 1.0), 2, ranks=3)
    with pytest.raises(
        UserError, match="memory has an entry for each of 2 ranks: got 3"
    ):
        space(stages(1.0, 1.0), 2, memory=[1.0, 2.0, 3.0])
    with pytest.raises(UserError, match=r"placement .* got \[0, 2\]"):
        space(stages(1.0, 1.0), 2, placement=[0, 2])
