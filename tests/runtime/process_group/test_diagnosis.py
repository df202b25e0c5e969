"""Who is to blame, from tables of what is seen of each rank: the time-out is 10 s."""

import pytest

from toolkit.runtime.process_group.diagnosis import (
    Diagnosis,
    Position,
    RankStatus,
    Seen,
    diagnose,
    lost_store,
)

TIMEOUT = 10.0


def at(
    what="FORWARD", *peers, seconds=0.0, status=RankStatus.RUNNING, error="", host="", exact=True
):
    return Seen(Position(what, 7, peers), seconds, status, error, host, exact)


def waits(*peers, seconds=0.0, **more):
    return at("RECV", *peers, seconds=seconds, **more)


def diagnosis(*table, me=0, patience=5.0) -> Diagnosis | None:
    return diagnose(dict(enumerate(table)), me, TIMEOUT, patience)


def test_nobody_is_blamed_while_all_get_on():
    assert diagnosis(at(seconds=99), at(seconds=99)) is None
    assert diagnosis(waits(1, seconds=99), at(seconds=9)) is None


def test_the_dead_are_blamed_at_once_with_who_waits_for_them():
    assert diagnosis(waits(1), waits(2), at("BACKWARD", status=RankStatus.DEAD)) == (
        2,
        "rank 2 has died (its process is gone), in step 7 at BACKWARD;"
        " rank 1 waited for it in step 7 at RECV",
    )


def test_a_rank_that_waits_for_nobody_notices_the_dead_too():
    assert diagnosis(at(), at(), at("BACKWARD", status=RankStatus.DEAD)) == (
        2,
        "rank 2 has died (its process is gone), in step 7 at BACKWARD; rank 0 was then in step 7"
        " at FORWARD",
    )


def test_of_two_dead_ranks_the_one_waited_for_is_blamed():
    found = diagnosis(waits(2), at(status=RankStatus.DEAD), at(status=RankStatus.DEAD))
    assert found is not None
    assert found.blamed == 2


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (RankStatus.STOPPED, "its process is stopped"),
        (RankStatus.SILENT, "its process or its connection hang"),
    ],
)
def test_a_rank_that_does_not_answer_is_blamed_after_the_time_out(status, why):
    assert diagnosis(waits(1, seconds=9.9), at(status=status)) is None
    found = diagnosis(waits(1, seconds=10), at("UPDATE", status=status))
    assert found is not None
    assert found.blamed == 1
    assert found.message.startswith(f"rank 1 has stalled: for 10 s it has not answered ({why}"), (
        found.message
    )
    assert found.message.endswith("in step 7 at UPDATE; rank 0 waited for it in step 7 at RECV"), (
        found.message
    )


def test_a_rank_that_does_not_answer_is_blamed_by_one_that_waits_for_nobody():
    found = diagnosis(at(seconds=10), at(status=RankStatus.STOPPED))
    assert found is not None
    assert found.blamed == 1


def test_a_rank_that_only_stands_is_blamed_if_waited_for():
    stuck = at("BACKWARD", seconds=12)
    assert diagnosis(waits(1, seconds=11), waits(2, seconds=11), stuck) == (
        2,
        "rank 2 has stalled: for 12 s it has not got on (its process is running), in step 7 at"
        " BACKWARD; rank 1 waited for it in step 7 at RECV; if it only takes long, raise timeout",
    )
    assert diagnosis(waits(1, seconds=11), at(seconds=3), stuck) is None
    assert diagnosis(waits(1, seconds=9), at(seconds=12)) is None


def test_in_a_collective_the_one_that_has_not_come_is_blamed():
    everyone = at("ALL_REDUCE", 0, 1, 2, 3, seconds=11)
    found = diagnosis(everyone, everyone, at("UPDATE", seconds=11), everyone)
    assert found is not None
    assert found.blamed == 2


def test_the_dead_are_blamed_before_the_stopped_and_these_before_the_stuck():
    dead, stopped, stuck = at(status=RankStatus.DEAD), at(status=RankStatus.STOPPED), at(seconds=11)
    mine = waits(1, 2, 3, seconds=11)
    for table, blamed in (
        ((stuck, stopped, dead), 3),
        ((stuck, stopped, stuck), 2),
        ((stuck, stuck, stuck), 1),
    ):
        found = diagnosis(mine, *table)
        assert found is not None
        assert found.blamed == blamed


def test_ranks_that_wait_for_each_other_are_all_named():
    circle = (waits(1, seconds=11), waits(2, seconds=12), waits(0, seconds=10))
    found = diagnosis(*circle)
    assert found is not None
    assert found.blamed is None
    assert found.message == (
        "ranks wait for each other for more than 10 s: rank 0 in step 7 at RECV; rank 1 in step 7"
        " at RECV; rank 2 in step 7 at RECV"
    )
    assert diagnosis(waits(1, seconds=11), waits(2, seconds=12), waits(0, seconds=1)) is None


def test_ranks_that_are_all_at_one_place_may_only_take_long():
    """As those of torch's wrappers are, whose backward both computes and waits for the others."""
    here = at("the gradients", 0, 1, 2, seconds=11)
    assert diagnosis(here, here, here) is None
    found = diagnosis(here, here, at("the weights", 0, 1, 2, seconds=11))
    assert found is not None
    assert found.blamed is None


def test_a_lost_connection_names_both_ends_once_no_better_reason_is_found():
    table = (
        waits(1, error="closed by peer"),
        at("SEND", 0, error="reset"),
        at("FORWARD"),
    )
    assert diagnosis(*table) is None
    assert diagnosis(*table, patience=0.0) == (
        None,
        "the connection between rank 0 and rank 1 is lost, and both run: rank 0 was in step 7 at"
        " RECV; rank 1 was in step 7 at SEND (closed by peer)",
    )


def test_in_a_collective_the_lost_connection_is_that_of_the_other_one_that_lost_one():
    hurt = at("ALL_REDUCE", 0, 1, 2, error="closed by peer")
    found = diagnosis(hurt, at("ALL_REDUCE", 0, 1, 2), hurt, patience=0.0)
    assert found is not None
    assert "between rank 0 and rank 2" in found.message
    found = diagnosis(hurt, hurt, hurt, patience=0.0)
    assert found is not None
    assert "between rank 0 and one of ranks 1, 2" in found.message


def test_a_rank_that_has_finished_is_blamed_only_if_waited_for():
    done = at("the end", status=RankStatus.DONE)
    assert diagnosis(at(seconds=11), done) is None
    assert diagnosis(waits(1), done) is None
    for mine in (waits(1, seconds=10), waits(1, error="closed by peer")):
        found = diagnosis(mine, done)
        assert found is not None
        assert found.message.startswith("rank 1 has finished, in step 7 at the end; rank 0 waited")


def test_a_rank_that_was_told_to_end_is_blamed_when_this_one_is_not_told_for_long():
    told = at(status=RankStatus.TERMINATED)
    mine = waits(1, error="closed by peer")
    assert diagnosis(mine, told) is None
    found = diagnosis(mine, told, patience=0.0)
    assert found is not None
    assert found.message.startswith("rank 1 was told to end by a signal, in step 7")


def test_machines_are_named_if_there_are_several():
    found = diagnosis(waits(1, host="a"), at(status=RankStatus.DEAD, host="b", exact=False))
    assert found is not None
    assert found.message.startswith("rank 1 (on b) has died (its process is gone), last seen in")


def test_a_lost_store_is_named():
    table = {0: waits(1), 1: at()}
    assert "the store at host:1, through which ranks meet, does not answer" in (
        lost_store(table, 0, "host:1").message
    )
