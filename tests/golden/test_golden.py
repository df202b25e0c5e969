"""Trajectories, instruction counts, peaks and bytes are those that were recorded."""

import json

import pytest

from tests.golden import cases
from toolkit.runtime import launch

GOLDEN = json.loads(cases.PATH.read_text())


@pytest.mark.parametrize("name", cases.PROGRAMS)
def test_programs(name):
    found = json.loads(json.dumps(cases.counts(cases.PROGRAMS[name])))
    expected = dict(GOLDEN["programs"][name])
    for key in ("bytes", "seconds"):
        assert found.pop(key) == pytest.approx(expected.pop(key), rel=1e-12)
    assert found == expected


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
@pytest.mark.parametrize("name", cases.PROGRAMS)
def test_trajectories_in_one_process(name, order):
    found = cases.in_one_process(cases.PROGRAMS[name], order)
    assert found == pytest.approx(GOLDEN["trajectories"][name], rel=1e-10, abs=1e-13)


def test_trajectories_on_two_ranks():
    expected = GOLDEN["two_ranks"]
    for found in launch(cases.on_two_ranks, 2):
        assert found.keys() == expected.keys()
        for name, trajectory in found.items():
            assert trajectory == pytest.approx(expected[name], rel=1e-10, abs=1e-13), (
                name
            )


def test_recorded_trajectories_differ():
    """The comparisons can fail: delays change the weights by far more than the tolerance."""
    dp, v1, v2 = (GOLDEN["trajectories"][name] for name in ("dp", "cdp_v1", "cdp_v2"))
    for one, other in ((dp, v1), (dp, v2), (v1, v2)):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-5
