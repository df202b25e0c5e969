"""Links of a plan as the processes of a job measure them."""

from dataclasses import replace

import pytest

from toolkit.cost import Hardware
from toolkit.errors import UserError
from toolkit.plan.measured_links import with_measured_links
from toolkit.runtime import launch

MACHINE = Hardware("m", 1e12, 1e11, link_bandwidth=1.0, link_latency=1.0, memory=5e9)


def measured():
    return with_measured_links(MACHINE, "cpu")


def test_the_first_process_has_the_links_of_the_job():
    first, second = launch(measured, 2)
    assert second is None
    # A loopback moves megabytes, not bytes, a second.
    assert first.link_bandwidth > 1e6
    assert 0 < first.link_latency < 0.5
    links = {"link_bandwidth": 1.0, "link_latency": 1.0}
    assert replace(first, name="m", **links) == MACHINE


@pytest.mark.parametrize(
    ("variables", "changes", "match"),
    [
        ({}, {}, "got one process"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, {}, "got 2 processes on a"),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
            {"ranks_per_machine": 8, "local_bandwidth": 1e9},
            "8 ranks per machine",
        ),
    ],
)
def test_refuses_jobs_whose_links_differ(monkeypatch, variables, changes, match):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=match):
        with_measured_links(replace(MACHINE, **changes))
