"""Late weights extrapolated to the step: what a program does for it, and what it costs."""

import pytest
from hypothesis import given

from tests.schedule.strategies import programs, quick
from tests.schedule.test_verify import before, drop, find, of, put, refusal, twice
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, Schedule, catalog
from toolkit.schedule.steady_state import footprint

PLACEMENTS = ["one", "per_microbatch", "per_stage", "per_stage_and_microbatch"]
V1 = catalog.cyclic(2, 1, correction="extrapolate")
DP = catalog.data_parallel(4, "one", delay=2, n_stages=1, correction="extrapolate")


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        # What is late is predicted once there are two versions.
        (V1, 4, [[(j, t - 1, t) for t in (2, 3) for j in range(2)]] * 2),
        # CDP-v2: the last worker reads all that is new, the first only the last stage.
        (catalog.cyclic(2, correction="extrapolate"), 4, [[(0, 1, 2), (0, 2, 3)], []]),
        (catalog.data_parallel(2, correction="extrapolate"), 3, [[], []]),
        # A rank predicts once for all that read the same.
        (DP, 5, [[(0, 1, 3), (0, 2, 4)]]),
        (
            Schedule.from_rank_orders(["0F0 0B0"], delay=1, correction="extrapolate"),
            3,
            [[(0, 1, 2)]],
        ),
    ],
)
def test_stage_version_and_step_of_predictions(schedule, n_steps, expected):
    ranks = schedule.lower(n_steps).verify().ranks
    assert [
        [i.weights for i in own if i.action == Action.PREDICT] for own in ranks
    ] == expected


@given(programs(states=["replicated"]))
@quick
def test_who_reads_a_prediction_holds_it(program):
    """Each op reads either kind, as the schedule has it; all that is predicted is read."""
    for order in program.ranks:
        ops = [i for i in order if i.action.computes]
        for i in ops:
            late = program.schedule.corrected.predicts and 0 < i.version < i.step
            assert (i.buffer == Buffer.PREDICTION) == late
        made = [i.weights for i in order if i.action == Action.PREDICT]
        assert sorted(made) == sorted(
            {i.weights for i in ops if i.buffer == Buffer.PREDICTION}
        )


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("delay", [1, "freshest"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_costs_weights_and_nothing_else(n, delay, placement):
    plain = footprint(catalog.cyclic(n, delay, placement))
    found = footprint(catalog.cyclic(n, delay, placement, correction="extrapolate"))
    assert found.weights > plain.weights
    if delay == 1 and placement in ("one", "per_microbatch"):
        assert found.weights == plain.weights + 1
    for name in (
        "ranks",
        "total_activations",
        "traffic",
        "messages",
        "traffic_in_slot",
        "rounds",
    ):
        assert getattr(found, name) == getattr(plain, name), name


def test_it_needs_one_version_more():
    schedule = catalog.data_parallel(2, delay=[2, 0], correction="extrapolate")
    assert [schedule.oldest_version(0, step) for step in (0, 2, 3, 4, 7)] == [
        0,
        0,
        0,
        1,
        4,
    ]
    assert [list(schedule.versions(j, 4)) for j in range(2)] == [[1, 2, 3, 4], [4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "sharded", "correction": "extrapolate"}, "got state='sharded'"),
        ({"correction": "false"}, "'false'"),
        ({"correction": 1}, "got 1"),
    ],
)
def test_refuses(options, message):
    for method in (catalog.data_parallel, catalog.cyclic):
        with pytest.raises(UserError, match=f"correction.*{message}"):
            method(3, delay=1, **options)


PROGRAM = catalog.cyclic(3, 1, correction="extrapolate").lower(4)


def instead(**fields):
    return lambda program, rank, i: put(program, rank, i, i._replace(**fields))


LATE = Buffer.PREDICTION


@pytest.mark.parametrize(
    ("action", "buffer", "change", "why"),
    [
        (
            Action.PREDICT,
            LATE,
            drop,
            "does not hold the prediction from version 1 of stage 0",
        ),
        (
            Action.FORWARD,
            LATE,
            instead(buffer=None),
            "weight version 1, and to predict from it",
        ),
        (Action.FORWARD, None, instead(buffer=LATE), "promises weight version 0\n"),
        (Action.PREDICT, LATE, instead(step=1), "predicts nothing from version 1"),
        (Action.PREDICT, LATE, twice, "holds that prediction already"),
        (
            Action.FREE,
            LATE,
            drop,
            "FREE prediction stage 2 step 2 version 1: it is missing",
        ),
    ],
)
def test_a_broken_program_is_refused(action, buffer, change, why):
    place = find(PROGRAM, lambda i: (i.action, i.buffer) == (action, buffer))
    assert why in refusal(change(PROGRAM, *place), PROGRAM)


@pytest.mark.parametrize("version", [0, 1])
def test_a_prediction_without_both_versions(version):
    rank, predict = find(PROGRAM, of(Action.PREDICT))
    frees = (i for i in PROGRAM.ranks[rank] if i.action == Action.FREE)
    free = next(i for i in frees if i.weights == (predict.stage, version))
    message = refusal(before(PROGRAM, rank, free, predict))
    assert f"{predict}: the rank does not hold version {version} of" in message
