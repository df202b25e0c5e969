"""Schedules next to DistributedDataParallel, on equal stages and links that take no time."""

from dataclasses import replace

import pytest

from toolkit.cost import Hardware, StageCost
from toolkit.cost.simulation_table import SimulationTable
from toolkit.cost.tensor_width import Width
from toolkit.schedule import catalog

FAST = Hardware("fast", flops=1e30, memory_bandwidth=1e30, link_bandwidth=1e30)


def costs_of(n_stages, cut):
    """Stages that take 6 s together: 2 s forward and 4 s backward."""
    stage = StageCost(
        0.0,
        0.0,
        parameter_bytes=12.0 / n_stages,
        forward_seconds=2 / n_stages,
        backward_seconds=4 / n_stages,
    )
    return (stage,) * n_stages


@pytest.fixture
def table():
    width = Width(1, FAST, 1.0)
    return SimulationTable(costs_of, costs_of, width, batch=8, optimizer_words=1.0)


def test_the_baseline_comes_once_before_the_first_schedule(table):
    baseline, cdp = table.rows_of("CDP", catalog.cyclic(2))
    assert (baseline.name, cdp.name) == ("DDP", "CDP")
    assert baseline.seconds == pytest.approx(6)
    assert cdp.seconds == pytest.approx(6)
    assert (baseline.n_samples, cdp.n_samples, cdp.baseline) == (16, 16, 6)
    (again,) = table.rows_of("CDP-v1", catalog.cyclic(2, 1))
    assert again.baseline == pytest.approx(6)


def test_one_device_and_unequal_workers_have_no_baseline(table):
    (alone,) = table.rows_of("one", catalog.gradient_accumulation(2, 3))
    assert alone.baseline is None
    (unequal,) = table.rows_of("1F1B", catalog.one_f_one_b(2, 3))
    assert table.cells(unequal)["by DDP's time"] == "-"


def test_rows_are_of_the_steady_state_and_drawn_steps_of_their_number(table):
    *_, cdp = table.rows_of("CDP", catalog.cyclic(2))
    timeline = table.draw(cdp, 3)
    assert {span.step for span in timeline.spans} == {0, 1, 2}
    assert cdp.drawn.name == "CDP"
    row = table.cells(cdp)
    assert (row["schedule"], row["by DDP's time"], row["devices"]) == ("CDP", "1.00", 2)
    assert row["accuracy"] == "late weights"


def test_compressed_activations_are_named_where_they_are_sent(table):
    compressed = replace(table, boundary_compression="int8")
    *_, pipeline = compressed.rows_of("1F1B", catalog.one_f_one_b(2, 4))
    *_, workers = compressed.rows_of("CDP", catalog.cyclic(2))
    assert pipeline.accuracy == "activations in 8 bits"
    assert workers.accuracy == "late weights"
    assert compressed.rivals() == []


def test_rivals_stand_beside_compressed_messages_alone(table):
    table.rows_of("CDP", catalog.cyclic(2, 1))
    assert table.rivals() == []
    compressed = replace(table, compression="bf16")
    compressed.rows_of("CDP", catalog.cyclic(2, 1))
    names = [rival.name for rival in compressed.rivals()]
    assert any("DDP" in name for name in names)
    assert all(rival.baseline == pytest.approx(6) for rival in compressed.rivals())
