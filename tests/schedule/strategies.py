"""Random schedules, small: any sizes, timing, placement, delay, state, chains that fit together."""

from dataclasses import replace

from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st

from tests.thorough import more
from toolkit.errors import UserError
from toolkit.schedule import (
    CHAINS,
    CORRECTIONS,
    PLACEMENTS,
    STATES,
    Kind,
    Op,
    RandomDelay,
    Schedule,
    Timing,
    timing,
)
from toolkit.schedule.staleness import PER

quick = settings(
    deadline=None,
    max_examples=more(20, 60),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
RULES = ("simultaneous", "cyclic", "sequential", "shifted", "split")
DELAYS = ("freshest", "matrix", "list", "random", 1, 2, 3)


def shifted(n_stages, offsets, period, backward=(Kind.BACKWARD,)):
    """Micro-batch m starts ``offsets[m]`` slots after the step, which may be steps later."""
    starts = {}
    for m, offset in enumerate(offsets):
        for j in range(n_stages):
            starts[Op(Kind.FORWARD, j, m)] = offset + j
            for k, kind in enumerate(backward, 2):
                starts[Op(kind, j, m)] = offset + k * n_stages - 1 - j
    return Timing(starts, period)


def split(n_stages, offsets, period):
    """As :func:`shifted`, the gradients of the parameters coming after those of the inputs."""
    return shifted(
        n_stages, offsets, period, (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )


@st.composite
def timings(draw, n_stages, n_microbatches, rules=RULES, accumulate=1):
    rule = draw(st.sampled_from(rules))
    if rule in ("simultaneous", "cyclic"):
        return getattr(timing, rule)(n_stages, n_microbatches // accumulate, accumulate)
    if rule == "sequential":
        return timing.simultaneous(n_stages, 1, n_microbatches)
    offset = st.integers(0, 6 * n_stages)
    offsets = draw(st.lists(offset, min_size=n_microbatches, max_size=n_microbatches))
    if rule == "split":
        return split(n_stages, offsets, 3 * n_stages)
    return shifted(n_stages, offsets, draw(st.integers(2 * n_stages, 4 * n_stages)))


@st.composite
def matrices(draw, least):
    """A staleness matrix that is nowhere less than ``least``."""
    extra = st.integers(0, 2)
    return tuple(tuple(d + draw(extra) for d in row) for row in least)


@st.composite
def random_delays(draw, least=0, most=3):
    """Any, of which the least is ``least`` or more, and the most up to ``most`` more."""
    least += draw(st.integers(0, 1))
    kinds = ("uniform", {}), ("geometric", {"p": 0.4}), ("poisson", {"mean": 1.5})
    kind, numbers = draw(st.sampled_from(kinds))
    most = least + draw(st.integers(0, most))
    per, seed = draw(st.sampled_from(PER)), draw(st.integers(0, 9))
    return RandomDelay(kind, least, most, per=per, seed=seed, **numbers)


@st.composite
def schedules(
    draw, max_size=6, placements=PLACEMENTS, states=STATES, rules=RULES, chains=CHAINS
):
    s, m = draw(st.integers(1, max_size)), draw(st.integers(1, max_size))
    accumulate = draw(st.sampled_from([k for k in range(1, m + 1) if m % k == 0]))
    placement, state = draw(st.sampled_from(placements)), draw(st.sampled_from(states))
    when = draw(timings(s, m, rules, accumulate))
    try:
        free = Schedule(
            "any", s, m, when, placement, "freshest", state, accumulate=accumulate
        )
    except UserError as error:
        assert "in the same slot" in str(error)  # noqa: PT017 - nothing else may be wrong
        reject()
    delay = draw(st.sampled_from(DELAYS))
    if delay == "matrix":
        delay = draw(matrices(free.staleness))
    elif delay == "list":
        (delay,) = draw(matrices([map(max, free.staleness)]))
    elif delay == "random":
        delay = draw(random_delays(free.max_staleness))
    elif delay != "freshest":
        delay = max(delay, free.max_staleness)
    correction = draw(st.sampled_from(CORRECTIONS)) if state == "replicated" else "none"
    late = replace(free, delay=delay)
    try:
        late = replace(late, correction=correction)
    except UserError as error:
        assert "before their update" in str(error)  # noqa: PT017 - nothing else may be wrong
    return draw(st.sampled_from([*with_chains(late, chains)]))


def with_chains(schedule, chains):
    """The schedule with those of the chains that it takes."""
    for one in chains:
        try:
            yield replace(schedule, chains=one)
        except UserError as error:
            assert f'chains="{one}" takes' in str(error)  # noqa: PT017 - nothing else is wrong


@st.composite
def programs(draw, max_size=4, max_steps=3, **kinds):
    schedule = draw(schedules(max_size, **kinds))
    return schedule.lower(draw(st.integers(1, max_steps)), draw(st.integers(0, 3)))
