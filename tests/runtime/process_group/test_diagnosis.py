"""Which rank is to blame, from tables of what each rank is seen to do: the time-out is 10 s."""

import pytest

from toolkit.runtime.process_group.diagnosis import diagnose
from toolkit.runtime.process_group.shared_status import RankStatus, Record


def at(what="FORWARD", *peers, seconds=0.0, status=RankStatus.RUNNING, **more):
    return Record(what, 7, peers, 0.0, seconds, status, **more)


def waits(*peers, **more):
    return at("RECV", *peers, **more)


def find(*ranks, patience=5.0):
    return diagnose(dict(enumerate(ranks)), 0, 10.0, patience)


DEAD, SILENT = (
    at("UPDATE", status=RankStatus.DEAD),
    at("UPDATE", status=RankStatus.SILENT),
)
ENDED, STUCK = at("the end", status=RankStatus.ENDED), at("BACKWARD", seconds=12)
GATHER, HURT = (
    at("ALL_REDUCE", 0, 1, 2),
    at("ALL_REDUCE", 0, 1, 2, error="closed by peer"),
)
EVERYONE = at("ALL_REDUCE", 0, 1, 2, 3, seconds=11)
SAME_PLACE = at("the gradients", 0, 1, 2, seconds=11)
LOST = waits(1, error="closed by peer")


@pytest.mark.parametrize(
    "ranks",
    [
        (at(seconds=99), at(seconds=99)),
        (waits(1, seconds=99), at(seconds=9)),
        (waits(1, seconds=9.9), SILENT),
        (waits(1, seconds=11), at(seconds=3), STUCK),
        (waits(1, seconds=9), STUCK),
        (waits(1, seconds=11), waits(2, seconds=12), waits(0, seconds=1)),
        # Torch's wrappers both compute and wait for the others in one place.
        (SAME_PLACE, SAME_PLACE, SAME_PLACE),
        (LOST, at("SEND", 0, error="reset"), at()),
        (at(seconds=11), ENDED),
        (waits(1), ENDED),
        (LOST, ENDED),
    ],
)
def test_no_rank_is_blamed_too_early(ranks):
    assert find(*ranks) is None


@pytest.mark.parametrize(
    ("blamed", "ranks"),
    [
        (2, (waits(1), waits(2), DEAD)),
        (2, (at(), at(), DEAD)),
        (2, (waits(2), DEAD, DEAD)),
        (1, (waits(1, seconds=10), SILENT)),
        (1, (at(seconds=10), SILENT)),
        (2, (waits(1, seconds=11), waits(2, seconds=11), STUCK)),
        (2, (EVERYONE, EVERYONE, at("UPDATE", seconds=11), EVERYONE)),
        (3, (waits(1, 2, 3, seconds=11), STUCK, SILENT, DEAD)),
        (2, (waits(1, 2, 3, seconds=11), STUCK, SILENT, STUCK)),
        (1, (waits(1, 2, 3, seconds=11), STUCK, STUCK, STUCK)),
        (1, (waits(1, seconds=10), ENDED)),
    ],
)
def test_the_rank_at_fault_is_blamed(blamed, ranks):
    diagnosis = find(*ranks)
    assert diagnosis.blamed == blamed
    assert diagnosis.message.startswith(f"rank {blamed} ")
    assert f", {ranks[blamed].position};" in diagnosis.message


def test_ranks_that_wait_for_each_other_are_all_named():
    """Such as one that saves the weights alone while the others go on."""
    saves = at("weights of rank 1", 1, seconds=11)
    diagnosis = find(saves, waits(2, seconds=12), waits(0, seconds=10))
    assert diagnosis.blamed not in (0, 1, 2)
    for rank, place in enumerate(("weights of rank 1", "RECV", "RECV")):
        assert f"rank {rank} in step 7 at {place}" in diagnosis.message
    assert find(saves, waits(2, seconds=12), waits(0, seconds=9)) is None


def test_the_message_says_who_waited_and_where():
    message = find(waits(1), DEAD._replace(host="b")).message
    assert "rank 1 (on b) " in message
    assert "last seen in" in message
    assert find(waits(1), waits(2), DEAD).message.endswith(
        "in step 7 at UPDATE; rank 1 waited for it in step 7 at RECV"
    )
    assert find(at(), at(), DEAD).message.endswith("rank 0 was in step 7 at FORWARD")


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        ((LOST, at("SEND", 0, error="reset"), at()), "rank 1 "),
        ((HURT, GATHER, HURT), "rank 2 "),
        ((HURT, HURT, HURT), "one of ranks 1, 2 "),
    ],
)
def test_a_lost_connection_names_both_ends_after_the_patience(ranks, ends):
    """A rank that has ended explains it, though."""
    diagnosis = find(*ranks, patience=0.0)
    assert diagnosis.blamed is None
    assert f"between rank 0 and {ends}" in diagnosis.message
    assert "(closed by peer)" in diagnosis.message
    assert find(LOST, ENDED, patience=0.0).blamed == 1
