"""Plans: what is tried, what is left out, and what is chosen."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from torch import nn

from tests.figures.test_explorer import composed
from tests.thorough import thorough
from toolkit.cost import (
    UNIT,
    Hardware,
    StageCost,
    affordable_delay,
    profile,
    simulate,
    unit_costs,
)
from toolkit.cost.compression import compressed_costs
from toolkit.cost.cost_file import FileCosts
from toolkit.cost.slow_link_rivals import ddp_costs
from toolkit.cost.worker_forms import BUCKETS, TIMED_STEPS
from toolkit.errors import UserError
from toolkit.model import Features, Images, Sequences, partition
from toolkit.model.partition import Traced
from toolkit.plan import Limits, PlanOptions, Prediction, plan, plan_costs
from toolkit.plan.candidates import Candidate, candidates, data_options
from toolkit.plan.choice import (
    best_of_classes,
    choose_prediction,
    reason_to_stay,
    worth_a_fresher_delay,
)
from toolkit.plan.compressed_candidates import with_compressions
from toolkit.plan.predictions import Predictor, front
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.steady_state import steps_to_time

IMAGES = Images(3, 16, 16, 10)
SLOW = Hardware("slow links", 1e12, 5e10, 2e8, memory=1e9)
ON_4 = Candidate(ScheduleSpec("cdp_v1", 8, 4, chains="rotated"), 1)


def net(depth=7):
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


@pytest.fixture(scope="module")
def found():
    return plan(net(), IMAGES, SLOW, 2, batch=2, options=PlanOptions(jobs=1))


def test_a_plan_of_costs_of_a_file():
    """All micro-batches are the measured ones; more stages than rows are left out."""
    cost = StageCost(
        0,
        0,
        1e6,
        0,
        1e3,
        1e6,
        forward_seconds=0.01,
        backward_seconds=0.02,
        weight_share=0.5,
    )
    file_costs = FileCosts(Path("mine.csv"), (cost,) * 4, batch=3)
    options = PlanOptions(jobs=1)
    found = plan_costs(file_costs, SLOW, 2, batch=12, options=options)
    assert {prediction.candidate.batch for prediction in found.predictions} == {3}
    assert found.baseline.candidate.partition == BUCKETS
    # Two micro-batches of a worker, and messages.
    assert found.baseline.seconds > 2 * 4 * 0.03
    n_stages = {p.schedule.n_stages for p in found.predictions}
    assert n_stages == {2, 4}
    assert not found.left_out or min(found.left_out) > 4
    assert "MY_MODEL" in found.verdict
    with pytest.raises(UserError, match=r"6, 12, 24 samples.* batch=8"):
        plan_costs(file_costs, SLOW, 2, batch=8, options=options)
    with pytest.raises(UserError, match="batch"):
        plan_costs(replace(file_costs, batch=None), SLOW, 2, batch=12, options=options)


def made_up(seconds, memory=1.0, staleness=0.0, ranks=2, checkpoint="none", **more):
    candidate = Candidate(ScheduleSpec("dp", 2, 2), 1, checkpoint=checkpoint)
    return Prediction(candidate, seconds, memory, ranks, staleness, **more)


@pytest.mark.parametrize(("n_ranks", "batch"), [(1, 8), (3, 12), (4, 64)])
def test_candidates_use_the_ranks_and_divide_the_batch(n_ranks, batch):
    tried = candidates(n_ranks, batch)
    assert len({*tried}) == len(tried)
    for candidate in tried:
        assert candidate.schedule.n_microbatches * candidate.batch == batch
        assert candidate.schedule.n_ranks <= n_ranks
    plainest = tried[0]
    assert plainest.is_plain
    assert (plainest.schedule.max_staleness, plainest.schedule.n_ranks) == (0, n_ranks)


def test_every_method_is_a_candidate_unless_its_late_weights_serve_nothing():
    tried = {c.spec.method for c in (*candidates(1, 64), *candidates(4, 64))}
    assert tried == METHODS.keys() - {"published"}


def test_workers_vary_in_chains_groups_and_rounds():
    cyclic = [
        c.spec for c in candidates(4, 64) if c.spec.method == "cdp_v1" and c.is_plain
    ]
    varied = {
        (c.chains or "in_order", c.groups, c.accumulate or 1)
        for c in cyclic
        if not c.placement
    }
    assert varied == {*product(("in_order", "rotated"), (None, 2), (1, 2, 4))}


@pytest.mark.parametrize("k", [0, 100, 200, 300, 400, 500])
def test_options_make_the_schedule_of_a_candidate(k):
    candidate = candidates(4, 64)[k]
    assert composed(candidate.options(), "train") == candidate.schedule


@pytest.mark.parametrize(
    ("form", "own", "options"),
    [
        (Sequences(8, 256), True, "data=text data.root=MY_TEXT data.length=8"),
        (
            Images(3, 8, 8, 2),
            True,
            "data=image_folder data.root=MY_IMAGES data.image_size=8",
        ),
        (Images(1, 8, 8, 2), True, "data=MY_DATA"),
        (Features(64, 2), False, "data=MY_DATA"),
        (
            IMAGES,
            False,
            "data=synthetic data.image_size=16 data.in_channels=3 data.n_classes=10",
        ),
    ],
)
def test_options_of_samples(form, own, options):
    assert data_options(form, own=own) == options


@pytest.mark.parametrize("memory", [20.0])
def test_no_prediction_is_below_its_bound(memory):
    predictor = Predictor(replace(UNIT, link_bandwidth=2.0), Limits(memory=memory), 1.0)
    for candidate in (c for c in candidates(3, 12) if c.is_plain):
        costs = unit_costs(candidate.spec.stages, backward=2.0)
        (predicted,) = predictor.predict([candidate], [costs])
        bound = predictor.bound(candidate, costs)
        assert bound.seconds <= predicted.seconds * (1 + 1e-9)
        assert bound.memory <= predicted.memory
        assert bound.fits >= predicted.fits


def test_the_front_is_what_nothing_beats():
    one, small, fresh = made_up(1, 5, 1), made_up(2, 1, 1), made_up(3, 5, 0)
    slower, broken = made_up(2, 6, 1), made_up(0.1, fits=False)
    assert front([slower, fresh, small, broken, one]) == [one, small, fresh]


def test_the_reason_to_stay_names_what_is_faster():
    dp, late = made_up(1.0), made_up(0.94, 2, 1.0)
    unfit = made_up(0.5, fits=False)
    assert choose_prediction([dp, late, unfit], dp) == dp
    for number in ("0.94", "1.00", "10%"):
        assert number in reason_to_stay([dp, late, unfit], dp)
    assert "3%" in reason_to_stay([dp, made_up(0.98, 2, 1.0)], dp)


def test_a_choice_weighs_time_staleness_and_memory():
    dp = made_up(1.0)
    late, fresher = made_up(0.80, 2, 1.0), made_up(0.82, 3, 0.25)
    assert choose_prediction([dp, late, fresher], dp) == fresher
    assert choose_prediction([dp, late], dp) == late
    assert choose_prediction([dp, made_up(0.98)], dp) == dp
    assert choose_prediction([dp, made_up(0.95, staleness=1.0)], dp) == dp
    assert choose_prediction([dp, late, small := made_up(0.81, 1, 1.0)], dp) == small
    assert (
        choose_prediction([dp, late, made_up(0.81, 1, 1.0, checkpoint="all")], dp)
        == late
    )
    lacking = replace(dp, fits=False)
    assert choose_prediction([lacking, late], lacking) == late
    assert choose_prediction([lacking], lacking) is None


def test_predictions_are_those_of_the_simulator(found):
    base = found.baseline
    example = IMAGES.example(base.candidate.batch, "meta")
    stages = Traced.of(net().to("meta"), example).cut_in_buckets()
    costs = profile(stages, example)
    program = base.schedule.lower(steps_to_time(base.schedule)).verify()
    timeline = simulate(program, costs, SLOW, [cost.parameter_bytes for cost in costs])
    assert base.seconds == pytest.approx(timeline.step_time, rel=1e-9)
    assert base.memory == max(map(timeline.peak_memory, range(2)))
    assert (base.candidate.spec.method, base.candidate.partition) == ("dp", BUCKETS)
    best = found.best
    stages = partition(
        net().to("meta"), best.schedule.n_stages, example, best.candidate.partition
    )
    program = best.schedule.lower(steps_to_time(best.schedule, TIMED_STEPS)).verify()
    costs = profile(stages, example)
    timeline = simulate(program, costs, SLOW, [cost.parameter_bytes for cost in costs])
    assert best.seconds == pytest.approx(timeline.step_time, rel=1e-9)
    assert best.memory == max(map(timeline.peak_memory, range(2)))


def test_slow_links_favour_late_weights(found):
    assert found.best.staleness > 0
    assert found.best.seconds < found.baseline.seconds
    assert len(found.predictions) < found.n_candidates
    assert found.baseline in found.predictions
    for fits in (p for p in found.predictions if p.fits):
        assert any(p.dominates(fits) for p in found.front)
    first, second = found.verdict.splitlines()
    assert (
        f"{found.best.seconds / found.baseline.seconds:.2f} of the step time" in first
    )
    assert found.best.candidate.options() in second


def test_fast_schedules_with_late_weights_are_settled():
    late = replace(made_up(0.8, staleness=1.0), candidate=ON_4)
    fresher = made_up(0.87, staleness=0.5)
    assert worth_a_fresher_delay([late, made_up(1.0)]) == [ON_4]
    assert worth_a_fresher_delay([late, fresher]) == []
    assert worth_a_fresher_delay([late, replace(fresher, fits=False)]) == [ON_4]
    assert (
        worth_a_fresher_delay([replace(late, fits=False), made_up(0.8, staleness=1.0)])
        == []
    )


def test_settled_candidates_have_the_affordable_delay():
    hardware, costs = replace(UNIT, link_bandwidth=0.25), unit_costs(8, backward=2.0)
    settled = Predictor(hardware, Limits(), 1.0).find_affordable_delay(ON_4, costs, 0.1)
    delay = affordable_delay(
        ON_4.schedule, costs, hardware, within=0.1, optimizer_bytes=[1.0] * 8
    )
    assert settled.schedule.staleness == delay
    assert 0 < settled.staleness < 1
    assert "schedule.delay={within: 0.1}" in settled.candidate.options()


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"staleness": 0}, lambda p: p.staleness == 0),
        ({"memory": 250e3}, lambda p: p.memory <= 250e3),
        ({"seconds": 3e-4}, lambda p: p.seconds <= 3e-4),
    ],
)
def test_limits_hold(found, limits, kept):
    options = PlanOptions(jobs=1, limits=Limits(**limits))
    limited = plan(net(), IMAGES, SLOW, 2, batch=2, options=options)
    assert all(map(kept, [limited.best, *limited.front]))
    assert not all(map(kept, found.front))


def test_the_hardware_limits_memory_where_the_limit_is_above_it():
    """Rank 0 has less memory than the limit, and rank 1 has more."""
    costs = unit_costs(2)
    dp = Candidate(ScheduleSpec("dp", 2, 2), 1)
    free = Predictor(UNIT, Limits(), 1.0)
    (needed,) = (prediction.memory for prediction in free.predict([dp], [costs]))
    for memory, fits in ((needed, True), (0.9 * needed, False)):
        hardware = replace(UNIT, memories=(memory, 4 * needed))
        predictor = Predictor(hardware, Limits(memory=2 * needed), 1.0)
        assert [predictor.memory_of(rank) for rank in range(2)] == [memory, 2 * needed]
        assert [prediction.fits for prediction in predictor.predict([dp], [costs])] == [
            fits
        ]


def test_nothing_within_the_limits():
    options = PlanOptions(jobs=1, limits=Limits(memory=1e3))
    found = plan(net(), IMAGES, SLOW, 2, batch=8, options=options)
    assert (found.best, found.front) == (None, ())
    assert [p.candidate.spec.method for p in found.predictions] == ["dp"]
    assert "Nothing keeps the limits" in found.verdict


def test_models_of_few_stages_and_several_numbers_of_ranks():
    found = plan(
        net(depth=1), IMAGES, SLOW, [1, 2], batch=8, options=PlanOptions(jobs=1)
    )
    assert found.baseline.ranks == 2
    assert found.baseline.schedule.n_stages < 8
    assert {p.ranks for p in found.predictions} == {1, 2}


@thorough
def test_kinds_of_ranks_and_tiers_of_links(found):
    """Rank 1 is slower and smaller; within a machine messages are fast."""
    near = replace(SLOW, ranks_per_machine=2, local_bandwidth=1e12)
    equal = plan(net(), IMAGES, near, 2, batch=2, options=PlanOptions(jobs=1))
    assert equal.baseline.seconds < found.baseline.seconds
    mixed = replace(near, speeds=(1.0, 0.5), memories=(1e9, 290e3))
    slower = plan(net(), IMAGES, mixed, 2, batch=2, options=PlanOptions(jobs=1))
    assert equal.baseline.seconds < slower.baseline.seconds
    fits = {p.candidate: p.fits for p in slower.predictions}
    assert equal.baseline.fits > fits[equal.baseline.candidate]


@thorough
def test_processes_find_the_same(found):
    assert (
        plan(net(), IMAGES, SLOW, 2, batch=2, options=PlanOptions(jobs=2)).front
        == found.front
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"ranks": 0}, "ranks"),
        ({"ranks": 3, "batch": 16}, "batch=16"),
        ({"batch": 0}, "batch"),
        ({"hardware": "ethernet_10"}, "Hardware"),
    ],
)
def test_refused(arguments, match):
    given = {"hardware": SLOW, "ranks": 2, "batch": 8} | arguments
    with pytest.raises(UserError, match=match):
        plan(net(), IMAGES, options=PlanOptions(jobs=1), **given)


@pytest.mark.parametrize("limits", [{"memory": 0}, {"staleness": -1}, {"seconds": "1"}])
def test_refused_limits(limits):
    with pytest.raises(UserError, match=next(iter(limits))):
        Limits(**limits)


# Compressed messages


COMPRESSIONS = ("none", "bf16", "int8", "int4")


@pytest.fixture(scope="module")
def found_compressed():
    options = PlanOptions(jobs=1, compressions=COMPRESSIONS)
    return plan(net(), IMAGES, SLOW, 2, batch=2, options=options)


def sent_as(prediction, compression):
    candidate = replace(prediction.candidate, compression=compression)
    return replace(prediction, candidate=candidate)


def test_coarser_messages_dominate_nothing_finer():
    exact, faster = made_up(1.0), sent_as(made_up(0.5, 0.5), "int8")
    assert not faster.dominates(exact)
    assert not exact.dominates(faster)
    assert sent_as(exact, "bf16").dominates(sent_as(exact, "int8"))
    assert not sent_as(exact, "int4").dominates(sent_as(exact, "int8"))
    alike = [sent_as(exact, compression) for compression in reversed(COMPRESSIONS)]
    assert front(alike) == [exact]
    assert front([exact, faster]) == [faster, exact]


def test_the_best_has_exact_messages():
    dp = made_up(1.0)
    late, coarse = made_up(0.8, 2, 1.0), sent_as(made_up(0.3), "int8")
    slower, coarsest = sent_as(made_up(0.31), "int4"), sent_as(made_up(0.2), "int4")
    assert best_of_classes([dp, late, coarse], dp) == [late, coarse]
    assert best_of_classes([dp, late, coarse, slower], dp) == [late, coarse]
    assert best_of_classes([dp, coarse, coarsest], dp) == [dp, coarse, coarsest]
    assert best_of_classes([dp, sent_as(made_up(0.99), "int8")], dp) == [dp]
    unfit = [replace(dp, fits=False), replace(late, fits=False), coarse]
    assert best_of_classes(unfit, unfit[0]) == [coarse]
    assert "0.30" not in reason_to_stay([dp, coarse], dp)


@thorough
def test_which_candidates_have_compressed_messages():
    exact = candidates(4, 16, buckets=3)
    tried = with_compressions(exact, COMPRESSIONS)
    assert [c for c in tried if c.compression == "none"] == exact
    methods = {name: set() for name in COMPRESSIONS}
    for candidate in tried:
        if candidate.spec.placement is None:
            methods[candidate.compression].add(candidate.spec.method)
            assert (candidate.compression == "none") or "messages" in candidate.label
    assert {"dp", "cdp_v1", "cdp_v2", "zero_cdp_v1"} <= methods["int8"]
    assert {"dp", "cdp_v1"} <= methods["int4"]
    assert "zero_dp" not in methods["int4"]  # its sums meet in collectives
    assert {"dp", "zero_dp", "cdp_v1"} <= methods["bf16"]
    assert not {"gpipe", "one_f_one_b", "pipedream_2bw"} & set().union(
        *(methods[name] for name in COMPRESSIONS[1:])
    )
    assert with_compressions(candidates(1, 8), COMPRESSIONS) == candidates(1, 8)
    for compressions, match in ((["int2"], "int2"), ([], "int8"), ("int8", "int8")):
        with pytest.raises(UserError, match=match):
            with_compressions(exact, compressions)


@thorough
def test_a_plan_with_compressed_messages(found, found_compressed):
    """The exact part is that of the plan without; each class has a row and a note."""
    plain = {p.candidate: p for p in found.predictions}
    exact = {p.candidate: p for p in found_compressed.predictions if p.coarseness == 0}
    assert exact == plain
    assert found_compressed.best == found.best
    assert {p for p in found_compressed.front if p.coarseness == 0} == {*found.front}
    classes = [p.coarseness for p in found_compressed.coarser]
    assert classes == sorted({*classes})
    assert classes
    assert classes[0] > 0
    seconds = [p.seconds for p in (found_compressed.best, *found_compressed.coarser)]
    assert seconds == sorted(seconds, reverse=True)
    text = str(found_compressed)
    for prediction in found_compressed.coarser:
        compression = prediction.candidate.compression
        assert f"Sent as {compression}" in text
        assert prediction.accuracy in text
        assert f"runtime.compression={compression}" in found_compressed.command(
            prediction
        )
    assert "sent as" in text
    assert "sent as" not in str(found)
    rows = found_compressed.rows()
    assert {row["compression"] for row in rows} > {"none"}
    assert all(row["accuracy"] for row in rows)


def test_compressed_predictions_are_those_of_the_simulator(found_compressed):
    prediction = next(
        p for p in found_compressed.coarser if p.candidate.compression == "int8"
    )
    candidate, schedule = prediction.candidate, prediction.schedule
    example = IMAGES.example(candidate.batch, "meta")
    if candidate.partition == BUCKETS:
        costs = profile(Traced.of(net().to("meta"), example).cut_in_buckets(), example)
        costs, _ = ddp_costs(costs, SLOW, 2, "int8")
    else:
        stages = partition(
            net().to("meta"), schedule.n_stages, example, candidate.partition
        )
        costs = compressed_costs(profile(stages, example), "int8", state=schedule.state)
    timed = TIMED_STEPS if prediction.staleness else 1
    program = schedule.lower(steps_to_time(schedule, timed)).verify()
    timeline = simulate(program, costs, SLOW, [cost.parameter_bytes for cost in costs])
    assert prediction.seconds == pytest.approx(timeline.step_time, rel=1e-9)
    assert prediction.memory == max(map(timeline.peak_memory, range(2)))
