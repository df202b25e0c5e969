"""Delays drawn at random: the same for everybody, distributed as promised, and promised right."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick, random_delays, schedules
from toolkit.errors import UserError
from toolkit.schedule import RandomDelay, catalog
from toolkit.schedule.staleness import draws

GEOMETRIC = RandomDelay("geometric", 1, 3, p=0.5, seed=7)
POISSON = RandomDelay("poisson", 0, 2, mean=2, seed=7)
DELAYS = [RandomDelay(most=3, seed=7), GEOMETRIC, POISSON]


def test_draws_are_the_same_for_ever():
    """In every process (hash seeds differ), platform and version: results depend on them."""
    delay = RandomDelay(most=9, seed=3)
    expected = [7, 0, 5, 4, 2, 6, 9, 4, 5, 2, 6, 5, 2, 0, 1, 0, 5, 2, 3, 3, 2, 5, 3, 1]
    assert [delay.draw(0, 0, step) for step in range(24)] == expected


@given(random_delays(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
@quick
def test_a_draw_depends_on_stage_microbatch_and_step_only(delay, s, m, step):
    """Not on other draws, their order or number."""
    drawn = draws(delay, s, m, step)
    assert [len(row) for row in drawn] == [m] * s
    assert tuple(row[:m] for row in draws(delay, s + 2, m + 3, step)[:s]) == drawn
    for j, i in reversed([*product(range(s), range(m))]):
        assert delay.draw(j, i, step) == drawn[j][i]
        assert delay.least <= drawn[j][i] <= delay.most


@pytest.mark.parametrize("delay", DELAYS, ids=str)
@pytest.mark.parametrize(
    ("per", "by_stage", "by_microbatch"),
    [("microbatch", True, True), ("stage", True, False), ("step", False, False)],
)
def test_drawn_once_for_each(delay, per, by_stage, by_microbatch):
    drawn = [draws(replace(delay, per=per), 4, 4, step) for step in range(20)]
    assert len(set(drawn)) > 1
    assert any(len(set(zip(*rows, strict=True))) > 1 for rows in drawn) == by_microbatch
    assert any(len(set(rows)) > 1 for rows in drawn) == by_stage


@pytest.mark.parametrize(
    ("delay", "probabilities"),
    [
        (RandomDelay(), [1 / 2, 1 / 2]),
        (RandomDelay(least=2, most=4), [1 / 3, 1 / 3, 1 / 3]),
        (RandomDelay(least=2, most=2), [1]),
        (GEOMETRIC, [4 / 7, 2 / 7, 1 / 7]),
        (RandomDelay("geometric", most=5, p=1), [1]),
        (POISSON, [1 / 5, 2 / 5, 2 / 5]),
    ],
    ids=str,
)
def test_draws_are_distributed_as_they_should_be(delay, probabilities):
    """By stage, micro-batch and step. The seed is fixed, and so is the outcome."""
    expected = dict(enumerate(probabilities, delay.least))
    mean = sum(steps * probability for steps, probability in expected.items())
    assert catalog.data_parallel(2, delay=delay).mean_staleness == pytest.approx(mean)
    n, place = 2000, {"stage": 1, "microbatch": 1, "step": 1}
    for varied in place:
        found = Counter(delay.draw(**place | {varied: k}) for k in range(n))
        assert {k: found[k] / n for k in sorted(found)} == pytest.approx(
            expected, abs=0.035
        )


GEO, POI = {"distribution": "geometric"}, {"distribution": "poisson"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distribution": "normal"}, "distribution of delays 'normal'.* uniform"),
        ({"per": "worker"}, "per of a random delay 'worker'.* microbatch, stage"),
        *(({name: value}, f"{name} of a random delay .*got {value!r}")
          for name, value in (("most", 1.5), ("least", True), ("seed", "1"), ("most", None))),
        ({"least": -1}, "got least=-1, most=1"),
        ({"least": 2}, "got least=2, most=1"),
        ({"p": 0.5}, r"p=0\.5 .* distribution=geometric"),
        ({"mean": 1}, "mean=1 .* distribution=poisson"),
        (POI | {"p": 0.5, "mean": 1}, r"p=0\.5 .* distribution=geometric"),
        *((GEO | {"p": p}, f"^p of a geometric.*: got {p!r}") for p in (None, 0, 1.1, "0.5", True)),
        *((POI | {"mean": mean}, f"^mean of a poisson.*: got {mean!r}")
          for mean in (None, -1, float("inf"), float("nan"))),
    ],
    ids=str,
)  # fmt: skip
def test_refuses_an_invalid_random_delay(options, message):
    with pytest.raises(UserError, match=message):
        RandomDelay(**options)


@pytest.mark.parametrize("state", ["replicated", "sharded"])
@pytest.mark.parametrize(
    "placement", ["one", "per_microbatch", "per_stage_and_microbatch"]
)
@pytest.mark.parametrize(
    ("per", "least"), [*product(["microbatch", "stage", "step"], [0, 1])]
)
def test_forward_and_backward_read_what_is_drawn(least, per, placement, state):
    delay = RandomDelay(least=least, most=least + 2, per=per, seed=5)
    make = catalog.cyclic if least else catalog.data_parallel
    schedule = make(3, placement=placement, state=state, delay=delay)
    assert schedule.staleness == ((delay.most,) * 3,) * 3
    assert schedule.least_staleness == ((least,) * 3,) * 3
    program = schedule.lower(9, first_step=2).verify()
    late = set()
    for i in (i for rank in program.ranks for i in rank if i.action.computes):
        drawn = delay.draw(i.stage, i.microbatch, i.step)
        assert i.version == max(0, i.step - drawn)
        late.add(drawn)
    assert len(late) > 1


@pytest.mark.parametrize(
    ("make", "k"), [(catalog.data_parallel, 0), (catalog.cyclic, 2)]
)
def test_a_single_possible_delay_is_that_delay(make, k):
    drawn = make(3, delay=RandomDelay(least=k, most=k)).lower(5)
    assert drawn.ranks == make(3, delay=k).lower(5).ranks


@given(schedules(chains=["in_order"]), st.data())
@quick
def test_any_timing_takes_what_it_can_honour(schedule, data):
    least = replace(schedule, delay="freshest").max_staleness
    delay = data.draw(random_delays(least))
    replace(schedule, delay=delay).lower(3).verify()
    if least:
        delay = replace(delay, least=least - 1)
        with pytest.raises(
            UserError, match=rf"{least - 1} steps late.* least={least} or"
        ):
            replace(schedule, delay=delay)


@pytest.mark.parametrize(
    "options",
    [{"distribution": "geometric", "p": 0.3}, {"distribution": "poisson", "mean": 3.3}],
)
def test_long_delays_are_drawn_at_once(options):
    """Exactly, though their probabilities have thousands of digits."""
    delay = RandomDelay(most=1000, **options)
    assert 0 <= delay.draw(0, 0, 0) < 50
    with pytest.raises(UserError, match=r"most <= 1000: got least=0, most=1001"):
        replace(delay, most=1001)
