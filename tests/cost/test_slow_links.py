"""Who is fastest on slow links: the rows are those of the single simulations."""

from dataclasses import replace

import pytest

from toolkit.cost import Hardware, StageCost
from toolkit.cost.situations import assess_model
from toolkit.cost.slow_link_rivals import ddp_rival, local_sgd_rival
from toolkit.cost.slow_links import (
    assess_slow_links,
    slow_link_cells,
    slow_link_table,
)
from toolkit.cost.worker_forms import DataParallelJob
from toolkit.errors import UserError

WORKERS = 4
# All parameters, 8 x 4,000 bytes, cross a link in 2 2/3 steps.
LINKS = Hardware("links", flops=1.0, memory_bandwidth=1e12, link_bandwidth=5e2)


def costs_of(n_stages, cut):
    stage = StageCost(
        0.0,
        0.0,
        parameter_bytes=32_000 / n_stages,
        forward_seconds=8 / n_stages,
        backward_seconds=16 / n_stages,
        matrices=((80, 100 // n_stages),),
    )
    return (stage,) * n_stages


def test_whole_messages_take_what_the_situation_says():
    (whole, *rivals) = assess_slow_links(costs_of, LINKS, WORKERS, ["none"])
    situation = assess_model(costs_of, LINKS, WORKERS)
    assert whole["ratio"] == situation["ratio"] == pytest.approx(8 / 3)
    assert whole["ddp"] == situation["ddp"]
    for rule in ("cdp_v1", "cdp_v2"):
        assert whole[rule] / whole["ddp"] == situation[f"{rule}_time"]
    assert [rival["cdp_v1"] for rival in rivals[:2]] == [None, None]


def test_smaller_messages_take_less_time_under_every_rule():
    rows = list(assess_slow_links(costs_of, LINKS, WORKERS, ["none", "int8", "int4"]))
    for rule in ("ddp", "cdp_v1", "cdp_v2"):
        seconds = [row[rule] for row in rows[:3]]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[0] > seconds[2]
    job = DataParallelJob(costs_of, LINKS, WORKERS)
    assert rows[1]["ddp"] == ddp_rival(job, "int8").seconds
    assert rows[3]["ddp"] == ddp_rival(job, "powersgd", 4).seconds
    assert rows[4]["ddp"] == ddp_rival(job, "powersgd", 2).seconds
    assert rows[5]["ddp"] == local_sgd_rival(job).seconds
    lossy = ["none", "int8", "int4", "powersgd", "powersgd_2", "local_sgd"]
    assert [row["method"] for row in rows] == [*lossy, "free_links"]
    assert {row["whole_ddp"] for row in rows} == {rows[0]["ddp"]}


def test_low_rank_at_each_hop_has_no_form_of_ddp():
    quick = replace(LINKS, flops=1e12)  # products take no time to speak of
    low_rank, *_ = assess_slow_links(costs_of, quick, WORKERS, ["low_rank"])
    assert low_rank["ddp"] is None
    assert low_rank["cdp_v1"] < low_rank["whole_ddp"]
    assert slow_link_cells(ROW | low_rank)["DDP"] == ""


def test_no_method_undercuts_free_links():
    *rows, free = assess_slow_links(costs_of, LINKS, WORKERS, ["none", "int4"])
    for rule in ("ddp", "cdp_v1", "cdp_v2"):
        assert free[rule] == pytest.approx(24)  # forward and backward
        seconds = [row[rule] for row in rows if row[rule] is not None]
        assert min(seconds) > 0.999 * free[rule]
        assert max(seconds) > 1.5 * free[rule]


ROW = {
    "model": "net",
    "batch": 4,
    "samples": "images",
    "machine": "links",
    "ratio": 2.0,
    "method": "powersgd",
    "whole_ddp": 2.0,
    "ddp": 1.0,
    "cdp_v1": 0.5,
    "cdp_v2": None,
}


def test_a_table_has_a_column_a_method():
    others = (
        {"method": "local_sgd", "cdp_v1": None},
        {"method": "free_links", "ddp": 0.25},
    )
    assert slow_link_table([ROW, *({**ROW, **other} for other in others)]) == [
        {
            "model": "net, 4 images",
            "machine": "links",
            "M/C": "2",
            "DDP rank 4": "0.50",
            "CDP-v1 rank 4": "0.25",
            "local SGD": "0.50",
            "free links": "0.12",
        }
    ]


def test_times_are_divided_by_those_of_whole_messages():
    assert slow_link_cells(ROW) == {
        "model": "net, 4 images",
        "machine": "links",
        "M/C": "2",
        "messages": "rank 4",
        "DDP": "0.50",
        "CDP-v1": "0.25",
        "CDP-v2": "",
    }


def test_an_unknown_compression_is_refused():
    with pytest.raises(UserError, match="int2"):
        list(assess_slow_links(costs_of, LINKS, WORKERS, ["int2"]))
