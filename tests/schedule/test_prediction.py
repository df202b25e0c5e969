"""Late weights extrapolated to the step: what a program does for it, and what it costs."""

from functools import partial

import pytest
from hypothesis import given

from tests.schedule.strategies import programs, quick
from tests.schedule.test_verify import before, drop, find, put, refusal, twice
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, Schedule, catalog
from toolkit.schedule.steady_state import footprint

SIZES = range(2, 9)
PLACEMENTS = ["one", "per_microbatch", "per_stage", "per_stage_and_microbatch"]


V1 = catalog.cyclic(2, 1, predict=True)
DP = catalog.data_parallel(4, "one", delay=2, n_stages=1, predict=True)


def predicted(schedule, n_steps):
    """(stage, version, step) of what each rank predicts, in order."""
    return [
        [i.weights for i in order if i.action == Action.PREDICT]
        for order in schedule.lower(n_steps).verify().ranks
    ]


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        # What is late is predicted once there are two versions.
        (V1, 4, [[(j, t - 1, t) for t in (2, 3) for j in range(2)]] * 2),
        # CDP-v2: the last worker reads all that is new, the first only the last stage.
        (catalog.cyclic(2, predict=True), 4, [[(0, 1, 2), (0, 2, 3)], []]),
        (catalog.data_parallel(2, predict=True), 3, [[], []]),
        # A rank predicts once for all that read the same.
        (DP, 5, [[(0, 1, 3), (0, 2, 4)]]),
        (Schedule.from_rank_orders(["0F0 0B0"], delay=1, predict=True), 3, [[(0, 1, 2)]]),
    ],
)
def test_what_is_predicted(schedule, n_steps, expected):
    assert predicted(schedule, n_steps) == expected


@given(programs(states=["replicated"]))
@quick
def test_who_reads_a_prediction_holds_it(program):
    """Each op reads either kind, as the schedule has it; all that is predicted is read."""
    schedule = program.schedule
    for order in program.ranks:
        ops = [i for i in order if i.action.computes]
        for i in ops:
            late = schedule.predict and 0 < i.version < i.step
            assert (i.buffer == Buffer.PREDICTION) == late
        made = [i.weights for i in order if i.action == Action.PREDICT]
        assert sorted(made) == sorted({i.weights for i in ops if i.buffer is not None})


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("delay", [1, "freshest"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_costs_weights_and_nothing_else(n, delay, placement):
    plain = footprint(catalog.cyclic(n, delay, placement))
    found = footprint(catalog.cyclic(n, delay, placement, predict=True))
    assert found.weights > plain.weights
    if delay == 1 and placement in ("one", "per_microbatch"):
        assert found.weights == plain.weights + 1
    for name in ("ranks", "total_activations", "traffic", "messages", "traffic_in_slot", "rounds"):
        assert getattr(found, name) == getattr(plain, name), name


def test_it_needs_one_version_more():
    schedule = catalog.data_parallel(2, delay=[2, 0], predict=True)
    assert [schedule.oldest_version(j, 7) for j in range(2)] == [4, 7]
    assert [schedule.oldest_version(0, step) for step in (0, 2, 3, 4)] == [0, 0, 0, 1]
    assert [list(schedule.versions(j, 4)) for j in range(2)] == [[1, 2, 3, 4], [4]]


@pytest.mark.parametrize("method", [catalog.data_parallel, catalog.cyclic])
def test_sharded_state_is_refused(method):
    message = "predict=True takes state=\"replicated\": got state='sharded'"
    with pytest.raises(UserError, match=message):
        method(3, delay=1, state="sharded", predict=True)


@pytest.mark.parametrize("predict", ["false", 1])
def test_what_is_neither_true_nor_false_is_refused(predict):
    for method in (catalog.data_parallel, catalog.cyclic, partial(catalog.pipedream_2bw, 2)):
        with pytest.raises(UserError, match=f"predict is True or False: got {predict!r}"):
            method(2, predict=predict)


# Broken programs

PROGRAM = catalog.cyclic(3, 1, predict=True).lower(4)


def first(action, buffer=Buffer.PREDICTION):
    return find(PROGRAM, lambda i: i.action == action and i.buffer == buffer)


def instead(**fields):
    return lambda program, rank, i: put(program, rank, i, i._replace(**fields))


LATE = Buffer.PREDICTION


@pytest.mark.parametrize(
    ("action", "buffer", "change", "why"),
    [
        (Action.PREDICT, LATE, drop, "does not hold the prediction from version 1 of stage 0"),
        (Action.FORWARD, LATE, instead(buffer=None), "weight version 1, and to predict from it"),
        (Action.FORWARD, None, instead(buffer=LATE), "promises weight version 0\n"),
        (Action.PREDICT, LATE, instead(step=1), "predicts nothing from version 1"),
        (Action.PREDICT, LATE, twice, "holds that prediction already"),
        (
            Action.FREE,
            LATE,
            drop,
            "16, FREE prediction stage 2 step 2 version 1: it is missing",
        ),
    ],
)
def test_a_broken_program_is_refused(action, buffer, change, why):
    assert why in refusal(change(PROGRAM, *first(action, buffer)))


@pytest.mark.parametrize("version", [0, 1])
def test_a_prediction_without_both_versions(version):
    rank, predict = first(Action.PREDICT)
    free = next(
        i
        for i in PROGRAM.ranks[rank]
        if i.action == Action.FREE and i.weights == (predict.stage, version)
    )
    message = refusal(before(PROGRAM, rank, free, predict))
    assert f"{predict}: the rank does not hold version {version} of" in message
