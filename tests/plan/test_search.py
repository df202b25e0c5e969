"""Searched orders: known schedules again, better ones for unequal stages, and the limits kept."""

import time
from dataclasses import replace
from itertools import pairwise, permutations, product
from random import Random

import pytest

from toolkit.cost import UNIT, Hardware, StageCost, recomputing, simulate
from toolkit.cost.affordable_delay import step_seconds
from toolkit.errors import UserError
from toolkit.plan import exact, order_annealing
from toolkit.plan.list_schedule import list_schedule
from toolkit.plan.order_bound import step_bound
from toolkit.plan.search import search
from toolkit.plan.search_space import SearchSpace, order_problem
from toolkit.plan.stage_groups import StageGroups
from toolkit.plan.steady_search import search_steady
from toolkit.schedule import Schedule, catalog

V_OF_3 = (0, 1, 2, 2, 1, 0)


def stages(*forwards, held=1.0, **more):
    """Backwards take twice their forwards; only activations take room."""
    return tuple(
        StageCost(
            1,
            2,
            activation_bytes=held,
            forward_seconds=x,
            backward_seconds=2 * x,
            **more,
        )
        for x in forwards
    )


def problem(costs, m, placement=None, **options):
    return order_problem(costs, m, placement or range(len(costs)), UNIT, **options)


@pytest.mark.parametrize(
    ("make", "sizes", "placement", "split"),
    [
        (catalog.gpipe, (3, 4), None, False),
        (catalog.one_f_one_b, (4, 8), None, False),
        (catalog.zero_bubble, (4, 5), None, True),
        (catalog.v_half, (6, 7), V_OF_3, True),
    ],
)
def test_times_are_those_of_the_simulator(make, sizes, placement, split):
    schedule = make(*sizes)
    costs = stages(*(1 + j % 3 for j in range(sizes[0])))
    given = problem(costs, sizes[1], placement, split_backward=split)
    words = given.orders_of(schedule)
    assert given.period(words) == step_seconds(schedule, costs, UNIT)
    assert given.schedule(words, schedule.name) == schedule
    assert step_bound(given) <= given.period(words)


def test_messages_updates_and_unequal_ranks_count():
    costs = stages(
        1.0, 1.0, 2.0, output_bytes=0.25, input_bytes=0.25, parameter_bytes=2.0
    )
    hardware = Hardware("slow", 1, 20, 1, link_latency=0.125, speeds=(1, 2, 1))
    schedule = catalog.one_f_one_b(3, 6)
    given = order_problem(costs, 6, range(3), hardware, split_backward=False)
    assert given.period(given.orders_of(schedule)) == pytest.approx(
        step_seconds(schedule, costs, hardware), rel=1e-12
    )


# From their assumptions alone: 1F1B and ZB-H1 hold p micro-batches, ZB-V one more stage a rank.
@pytest.mark.parametrize(
    ("split", "placement", "memory", "m", "least"),
    [
        (False, (0, 1, 2, 3), 4, 8, 3 * (8 + 3)),
        (True, (0, 1, 2, 3), 4, 8, 3 * 8 + 3),
        (True, V_OF_3, 6, 5, 6 * 5),
    ],
    ids=["1F1B", "ZB-H1", "ZB-V"],
)
def test_known_schedules_are_found_and_proven(split, placement, memory, m, least):
    space = SearchSpace(
        stages(*[1.0] * len(placement)),
        m,
        placement=placement,
        memory=memory,
        split_backward=split,
    )
    found = search(
        space,
        catalogue=False,
        exact=None if placement == V_OF_3 else False,
        seconds=10,
    )
    assert (found.seconds, found.bound, found.proven) == (least, least, True)
    assert max(found.memory) <= memory


def step_of(orders, costs):
    """Seconds of a training step, by passes over all orders until nothing moves."""
    ends: dict = {}
    for step in range(4):
        left = [[*order] for order in orders]
        free = [
            max((ends[key] for key in ends if key[1] == r), default=0)
            for r in range(len(orders))
        ]
        moved = True
        while moved:
            moved = False
            for r, order in enumerate(left):
                while order:
                    kind, m = order[0]
                    needed = (
                        [("F", r - 1, m)] * (r > 0) if kind == "F" else [("F", r, m)]
                    )
                    needed += [("B", r + 1, m)] * (kind == "B" and r < len(orders) - 1)
                    if any((*key, step) not in ends for key in needed):
                        break
                    start = max([free[r], *(ends[*key, step] for key in needed)])
                    free[r] = start + costs[r] * (1 if kind == "F" else 2)
                    ends[kind, r, m, step] = free[r]
                    order.pop(0)
                    moved = True
        if any(left):
            return None
    last = [
        max(ends[key] for key in ends if key[1] == 0 and key[3] == k) for k in range(4)
    ]
    return last[3] - last[2]


def orders_of(m, first=False):
    """All orders of a stage's ops on m micro-batches that run forwards before their backwards."""
    ops = [(kind, k) for k in range(m) for kind in "FB"]
    for order in permutations(ops):
        forwards = [k for kind, k in order if kind == "F"]
        if first and any(a > b for a, b in pairwise(forwards)):
            continue  # the first rank's forwards number the micro-batches
        if all(order.index(("F", k)) < order.index(("B", k)) for k in range(m)):
            yield order


def most_held(order):
    held = [
        sum(1 if kind == "F" else -1 for kind, _ in order[:k])
        for k in range(len(order) + 1)
    ]
    return max(held)


@pytest.mark.parametrize("costs", [(1.0, 1.0), (1.0, 3.0), (2.0, 1.0)], ids=str)
@pytest.mark.parametrize("room", [2, 3])
def test_no_order_of_all_is_faster(costs, room):
    """Two stages, three micro-batches: every order, not only those in order of micro-batches."""
    ranks = [
        [o for o in orders_of(3, r == 0) if most_held(o) <= room] for r in range(2)
    ]
    times = [step_of(orders, costs) for orders in product(*ranks)]
    space = SearchSpace(stages(*costs), 3, memory=room, split_backward=False)
    found = search(space, catalogue=False, exact=True, seconds=1)
    assert found.seconds == found.bound == min(t for t in times if t is not None)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold(seed):
    """Of random costs: no proven orders are below the closed form."""
    draw = Random(seed)
    costs = [
        replace(
            stages(draw.randint(1, 3), held=draw.randint(1, 2))[0],
            parameter_bytes=draw.randint(0, 2),
        )
        for _ in range(4)
    ]
    hardware = Hardware("any", 1, 10, 4, link_latency=draw.randint(0, 1) / 2)
    placement = draw.choice([(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1)])
    given = order_problem(
        costs, 3, placement, hardware, memory=[16.0] * (max(placement) + 1)
    )
    solved, bound = exact.solve(given, list_schedule(given, [1.0, 0.0, *range(12)]), 10)
    assert step_bound(given) <= given.period(solved) + 1e-9
    assert given.period(solved) == pytest.approx(bound)


@pytest.mark.parametrize("split", [False, True])
def test_words_of_three_stages_by_brute_force(split):
    """Three stages; words of every rank, micro-batches in order."""
    m, room, costs = (2 if split else 3), 2, stages(1.0, 2.0, 1.0)
    given = problem(costs, m, split_backward=split, memory=[room] * 3)
    n = len(given.kinds)
    words = [
        [list(word) for word in {*permutations([*range(n * j, n * j + n)] * m)}]
        for j in range(3)
    ]
    ranks = [
        [
            w
            for w in words[j]
            if given.fits(j, w)
            and all(
                w[:k].count(c) >= w[:k].count(c + 1)
                for k in range(len(w))
                for c in w
                if c % n < n - 1
            )
        ]
        for j in range(3)
    ]
    least = min(given.period(orders) for orders in product(*ranks))
    solved, bound = exact.solve(
        given, list_schedule(given, [1.0, 0.0, *range(3 * n)]), 30
    )
    assert given.period(solved) == bound == least


def test_unequal_stages_are_faster_than_the_catalogue():
    """A large last stage: 1F1B with halves, at the memory of 1F1B."""
    costs = stages(1.0, 1.0, 1.0, 2.0)
    found = search(SearchSpace(costs, 6, memory=4), exact=False, seconds=3)
    best = min(
        step_seconds(make(4, 6), costs, UNIT)
        for make in (catalog.one_f_one_b, catalog.gpipe)
    )
    assert found.seconds < 0.9 * best
    program = found.schedule.lower(6).verify()
    timeline = simulate(program, costs, UNIT)
    assert timeline.step_time == found.seconds
    assert tuple(timeline.peak_memory(r) for r in range(4)) == found.memory


def test_stages_go_to_the_ranks_that_suit_them():
    hardware = Hardware("two kinds", 1, 1e9, 1e9, speeds=(1, 3))
    costs = stages(3.0, 1.0, 1.0, 3.0)
    found = search(
        SearchSpace(costs, 4, ranks=2, hardware=hardware), seconds=5, exact=False
    )
    load = [
        sum(costs[j].forward_seconds for j in range(4) if found.placement[j] == r)
        for r in (0, 1)
    ]
    assert load == [2.0, 6.0]
    assert found.seconds < 1.15 * found.bound


@pytest.mark.parametrize(
    "placement", [V_OF_3, (0, 1, 2, 0, 1, 2), (0, 0, 1, 2, 1, 2)], ids=str
)
@pytest.mark.parametrize("room", [2.5, 3.5, 9.0])
def test_listed_orders_end_and_fit(placement, room):
    """However little room there is, and whatever the keys."""
    costs = stages(1.0, 2.0, 1.0, 1.0, 3.0, 1.0)
    given = problem(costs, 5, placement, memory=[room] * 3)
    for interval in (0.0, 2.0, 9.0):
        for keys in (
            [0.0] * 18,
            [c % 3 for c in range(18)],
            [-(c % 7) for c in range(18)],
        ):
            words = list_schedule(given, [interval, 1.0, *keys])
            assert sorted(c for word in words for c in word) == sorted([*range(18)] * 5)
            assert given.period(words) < float("inf")
            assert all(map(given.fits, range(3), words))


def test_neighbours_on_a_rank_run_as_one_op():
    """Merged orders take no less time and room than the split ones that they stand for."""
    given = problem(stages(*[1.0] * 8), 4, [0] * 4 + [1] * 4, memory=[24.0] * 2)
    groups = StageGroups(given)
    merged = groups.merged
    assert groups.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert merged.seconds == (2.0,) * 12
    words = list_schedule(merged, [9.0, 0.0, *range(12)])
    assert groups.split(words)[0][:4] == [0, 3, 6, 9]
    assert given.period(groups.split(words)) <= merged.period(words)
    assert given.peaks(groups.split(words)) <= merged.peaks(words)
    assert step_bound(given) <= step_bound(merged)
    alone = problem(stages(*[1.0] * 8), 4, [0, 1] * 4)
    assert StageGroups(alone).merged is alone


def test_messages_that_wait_take_room():
    costs = stages(1.0, 4.0, input_bytes=0.5)
    given = problem(costs, 4, split_backward=False, memory=[4.0] * 2)
    words = [[0] * 4 + [1] * 4, [2, 3] * 4]
    schedule = given.schedule(words, "one after another")
    timeline = simulate(schedule.lower(6).verify(), costs, UNIT)
    assert given.peaks(words) == [timeline.peak_memory(0), timeline.peak_memory(1)]
    assert given.peaks(words)[1] > 1.5  # one micro-batch, and inputs of others
    found = search(
        SearchSpace(costs, 4, split_backward=False, memory=2.0), seconds=1, exact=False
    )
    assert max(found.memory) <= 2.0


def test_recomputing_stages_hold_less_and_take_longer():
    costs = recomputing(stages(1.0, 1.0), "all")
    given = problem(costs, 2, memory=[3.0] * 2)
    assert given.seconds == (1.0, 3.0, 0.0) * 2
    assert given.kept_bytes == (0.0, 0.0)
    found = search(SearchSpace(costs, 4, memory=3.0), seconds=1, exact=False)
    assert max(found.memory) <= 3.0


class Measured:
    """A timeline whose ranks take ``peaks`` bytes."""

    step_time = 12.0

    def __init__(self, peaks):
        self.peaks = peaks

    def peak_memory(self, rank):
        return self.peaks[rank]


def search_with_peaks(monkeypatch, peaks):
    """Search in 2 and 4 bytes, where the orders of attempt k take ``peaks[k][rank]`` bytes.

    Returns the rooms that are tried, and what is found or why nothing is.
    """
    rooms = []
    timelines = map(Measured, peaks)

    make_problem = SearchSpace.problem

    def problem_in(space, placement, room):
        if [*room] not in rooms[-1:]:
            rooms.append([*room])
        return make_problem(space, placement, room)

    monkeypatch.setattr(SearchSpace, "problem", problem_in)
    monkeypatch.setattr(SearchSpace, "simulate", lambda *_: next(timelines))
    options = {"split_backward": False, "placement": (0, 1)}
    space = SearchSpace(stages(1.0, 1.0), 4, memory=[2.0, 4.0], **options)
    try:
        found = search(space, exact=False, seconds=0.2)
    except UserError as error:
        return rooms, str(error)
    return rooms, found


def test_orders_that_take_more_memory_than_foreseen_are_sought_in_less_room(
    monkeypatch,
):
    """Less by the excess over the limit, then by twice the excess that is left."""
    peaks = [(2.25, 4.0), (2.125, 3.0), (2.0, 3.0)]
    rooms, found = search_with_peaks(monkeypatch, peaks)
    assert rooms == [[2.0, 4.0], [1.75, 4.0], [1.5, 4.0]]
    assert found.memory == (2.0, 3.0)


def test_orders_that_keep_taking_too_much_memory_end_the_search(monkeypatch):
    rooms, error = search_with_peaks(monkeypatch, [(2.0, 4.0625)] * 5)
    assert [room for _, room in rooms] == [4.0, 3.9375, 3.8125, 3.5625, 3.0625]
    assert error == (
        "no orders were found in a memory of [2.0, 4.0] bytes: give more, or more seconds"
    )


def test_mistakes():
    costs = stages(1.0, 1.0)
    with pytest.raises(
        UserError, match=r"stages \[0\] with one micro-batch take 1 bytes of rank 0"
    ):
        search(SearchSpace(costs, 2, memory=0.5))
    with pytest.raises(
        UserError, match=r"placement is the rank of each of 2 stages.*got \[0, 2\]"
    ):
        SearchSpace(costs, 2, placement=[0, 2])
    with pytest.raises(UserError, match="each of 3 ranks runs a stage: got 2 stages"):
        SearchSpace(costs, 2, ranks=3)
    with pytest.raises(
        UserError, match="memory has an entry for each of 2 ranks: got 1"
    ):
        SearchSpace(costs, 2, memory=[1.0])


NAN = float("nan")


@pytest.mark.parametrize(
    ("space", "options", "match"),
    [
        ({"memory": NAN}, {}, "memory is .* got nan"),
        ({"memory": [1.0, NAN]}, {}, "memory is .* got nan"),
        ({"memory": "80GB"}, {}, "memory .* got '80GB'"),
        ({"memory": [1.0, -1]}, {}, "memory is .* got -1"),
        ({"optimizer_bytes": [1]}, {}, "optimizer_bytes has .* 2 stages: got 1"),
        ({"optimizer_bytes": [1, NAN]}, {}, "optimizer_bytes is .* got nan"),
        ({"optimizer_bytes": 4}, {}, "optimizer_bytes .* 2 stages: got 4"),
        ({"placement": ["a", "b"]}, {}, "placement: .* 'a'"),
        ({"placement": [0, NAN]}, {}, "placement: .* nan"),
        ({"hardware": "a100_nvlink"}, {}, "hardware is a Hardware"),
        ({"costs": stages(0.0, 0.0)}, {}, "0 seconds"),
        ({}, {"seconds": NAN}, "seconds is .* got nan"),
        ({}, {"seconds": 0}, "seconds is .* got 0"),
        ({}, {"seconds": float("inf")}, "seconds is .* got inf"),
        ({}, {"seconds": "2"}, "seconds is .* got '2'"),
        ({}, {"step_seconds": NAN}, "step_seconds is .* got nan"),
        ({"n_microbatches": 3000}, {"seconds": 2}, "18000 ops .* 37 or more"),
    ],
)
@pytest.mark.parametrize(
    "find", [search, search_steady], ids=["search", "search_steady"]
)
def test_invalid_limits_and_seconds_are_refused_at_once(find, space, options, match):
    if find is search_steady and "step_seconds" in options:
        pytest.skip("search has it")
    begin = time.monotonic()
    with pytest.raises(UserError, match=match):
        find(
            SearchSpace(**{"costs": stages(1.0, 1.0), "n_microbatches": 2} | space),
            **options,
        )
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("n_stages", "n_microbatches", "options"),
    [(4, 40, {}), (4, 40, {"memory": 2}), (32, 4, {"ranks": 8}), (1, 160, {})],
    ids=str,
)
def test_a_search_ends_in_twice_its_seconds_at_the_largest_sizes(
    n_stages, n_microbatches, options
):
    costs = stages(*(1.0 + stage % 3 for stage in range(n_stages)))
    begin = time.monotonic()
    search(SearchSpace(costs, n_microbatches, **options), seconds=1)
    assert time.monotonic() - begin < 2
    with pytest.raises(UserError, match="1 seconds are too few"):
        search(SearchSpace(costs, 2 * n_microbatches, **options), seconds=1)


def test_or_tools_are_imported_within_the_seconds_of_the_search(monkeypatch):
    """The import takes seconds on a busy machine; later, it would only begin near the end."""
    pytest.importorskip("ortools")
    events = []
    import_solver = exact.cp_model
    list_catalogue = order_annealing._catalogue_orders

    def import_and_note():
        events.append("import")
        return import_solver()

    def list_and_note(*arguments):
        events.append("orders")
        return list_catalogue(*arguments)

    monkeypatch.setattr(exact, "cp_model", import_and_note)
    monkeypatch.setattr(order_annealing, "_catalogue_orders", list_and_note)
    search(SearchSpace(stages(1.0, 2.0), 3), seconds=0.5)
    assert events[:2] == ["import", "orders"]


def test_the_fewest_limits_that_cannot_be_met_together():
    """1F1B takes 33 s with 4 micro-batches on rank 0; faster steps need more room there alone."""
    costs = stages(*[1.0] * 4)
    options = {"catalogue": False, "exact": False, "seconds": 2}
    four, three = (
        SearchSpace(costs, 8, memory=k, split_backward=False) for k in (4, 3)
    )
    assert search(four, step_seconds=33, **options).seconds == 33
    given = problem(costs, 8, split_backward=False, memory=[3.0, 2.0, 2.0, 1.0])
    assert exact.conflict(given, 33, 20) == (0,)
    assert exact.conflict(given, 32, 20) == ()
    given = problem(costs, 8, split_backward=False, memory=[4.0, 2.0, 1.0, 1.0])
    assert exact.conflict(given, 33, 20) == (1,)
    given = problem(costs, 8, split_backward=False, memory=[4.0, 3.0, 2.0, 1.0])
    assert exact.conflict(given, 33, 20) is None
    with pytest.raises(
        UserError, match=r"no orders take 33 s a step in 3 bytes of rank 0: the fast"
    ):
        search(three, step_seconds=33, **options)
    with pytest.raises(
        UserError, match=r"no orders take 30 s a step in any memory: the fastest"
    ):
        search(four, step_seconds=30, **options)


def test_rooms_of_two_ranks_in_conflict():
    """With more room on either rank, steps take 36 s."""
    costs = stages(3.0, 1.0, 1.0)
    given = problem(costs, 3, (0, 1, 0), split_backward=False, memory=[3.0, 1.0])
    assert exact.solve(given, list_schedule(given, [1.0, 0.0, *range(6)]), 10)[1] == 38
    assert exact.conflict(given, 37, 20) == (0, 1)
    assert exact.conflict(given, 38, 20) is None


def test_without_or_tools_exact_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    with pytest.raises(UserError, match=r"pip install 'cyclic-dp\[search\]'"):
        exact.solve(problem(stages(1.0), 1), [[0, 1, 2]], 1.0)


def test_progress_is_reported():
    said = []
    search(
        SearchSpace(stages(1.0, 2.0, 1.5), 9, memory=2),
        seconds=2.5,
        exact=False,
        progress=lambda *x: said.append(x),
    )
    assert 1 <= len(said) <= 3
    for what, seconds, bound in said:
        assert what == "annealing"
        assert seconds >= bound > 0


def test_what_is_found_is_an_ordinary_schedule():
    found = search(SearchSpace(stages(1.0, 2.0), 3, memory=2), seconds=1, exact=False)
    again = Schedule.from_csv(found.schedule.to_csv(), name="searched")
    assert again == found.schedule
