"""The benchmark of failures: what passes, and one round of one fault."""

import re

import pytest

from tests.experiments.command import rows, run
from tests.thorough import thorough

PLACE = "in step 8 at UPDATE stage 1 step 8 version 9"
KILLED = f"rank 1 has died (its process is gone), {PLACE}; rank 2 waited for it in step 8 at RECV"
CUT = (
    "the connection between rank 3 and rank 1 is lost, and both run: rank 3 was in step 8 at SEND"
    " weights stage 1; rank 1 was in step 9 at RECV weights stage 1 (Connection closed)"
)
NO_PORT = "rank 1 cannot meet the others at localhost:4000 within 5 s: refused"


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("failure")


def ended(bench, fault="killed", messages=(KILLED,), place=PLACE, **changes):
    usual = {"ranks_seconds": 1.0, "seconds": 2.0, "status": 1}
    return bench.Round(fault, 0, 1, 0.5, place, messages=[*messages], **usual | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"fault": "cut", "messages": [CUT]}, []),
        ({"fault": "no_port", "messages": [NO_PORT], "place": "localhost:4000"}, []),
        ({"messages": []}, ["0 lines begin with error:"]),
        ({"messages": [KILLED, KILLED]}, ["2 lines begin with error:"]),
        ({"seconds": None}, ["it does not end"]),
        ({"seconds": 10.5}, ["it ended after 10.5 s, and not within 10"]),
        ({"left": 2}, ["2 processes are left"]),
        ({"status": 0}, ["its status is 0"]),
        (
            {"messages": [KILLED.replace("1 has", "0 has")]},
            ["the message blames 0, and not rank 1"],
        ),
        (
            {"messages": [KILLED.replace("UPDATE", "BACKWARD")]},
            [f"the message does not say where rank 1 was: {PLACE}"],
        ),
        (
            {"fault": "cut", "messages": [CUT.replace("rank 1", "rank 2")]},
            ["the message blames 3, 2, and not rank 1"],
        ),
        (
            {"fault": "cut", "messages": [CUT.replace("in step 9", "")]},
            [f"the message does not say where rank 1 was: {PLACE}"],
        ),
    ],
)
def test_problems_of_a_round(bench, changes, expected):
    assert bench.find_problems(ended(bench, **changes), 10) == expected


def test_the_row_of_a_fault(bench):
    failed = ended(bench, seconds=9.0, left=1)
    failed.problems = bench.find_problems(failed, 10)
    row = bench.summary([failed, ended(bench), ended(bench, seconds=4.0)], timeout=5)
    assert (row["rounds"], row["failed"], row["left"]) == (3, 1, 1)
    assert (row["end (s)"], row["beyond time-out (s)"], row["at most (s)"]) == (
        4.0,
        -1.0,
        4.0,
    )
    assert row["message"] == KILLED


@thorough
def test_a_killed_rank_of_two(tmp_path):
    options = ("bench.ranks=2", "bench.rounds=1", "bench.timeout=3", "bench.margin=60")
    finished = run(
        "bench",
        "bench=failure",
        *options,
        "bench.faults=[killed]",
        f"hydra.run.dir={tmp_path}",
    )
    assert finished.status == 0, finished.err
    (row,) = rows(tmp_path / "bench.csv")
    (done,) = rows(tmp_path / "rounds.csv")
    assert re.match(
        rf"rank {done['rank']} has died .* in step \d+ at ", row["message"]
    ), finished
    assert row["left"] == "0"
    assert not done["problems"], done
