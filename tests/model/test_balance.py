"""Cuts are the best of all, found by trying each."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick
from toolkit.model.partition import balanced


def stages(loads, cuts):
    return [sum(loads[a:b]) for a, b in pairwise([0, *cuts, len(loads)])]


def judged(loads, across, cuts):
    """Bytes, then how uneven the stages are."""
    return sum(across[cut - 1] for cut in cuts), sum(load**2 for load in stages(loads, cuts))


def best_of_all(loads, across, n_stages):
    every = [*combinations(range(1, len(loads)), n_stages - 1)]
    limit = min(max(stages(loads, cuts)) for cuts in every)
    within = [cuts for cuts in every if max(stages(loads, cuts)) == limit]
    least = max(min(stages(loads, cuts)) for cuts in within)
    rest = [cuts for cuts in within if 2 * min(stages(loads, cuts)) >= least]
    return limit, least, min(judged(loads, across, cuts) for cuts in rest)


@given(
    loads=st.lists(st.sampled_from([0, 1, 2, 3, 7, 2**53 + 1, 2**64]), min_size=1, max_size=8),
    ties=st.booleans(),
    data=st.data(),
)
@quick
def test_no_cuts_are_better(loads, ties, data):
    n_stages = data.draw(st.integers(1, len(loads)))
    n = len(loads) - 1
    across = data.draw(st.lists(st.integers(1, 2 if ties else 99), min_size=n, max_size=n))
    cuts = balanced(loads, across, n_stages)
    assert cuts == sorted(set(cuts))
    assert len(cuts) == n_stages - 1
    limit, least, best = best_of_all(loads, across, n_stages)
    found = stages(loads, cuts)
    assert max(found) == limit
    assert 2 * min(found) >= least
    assert judged(loads, across, cuts) == best


def test_few_bytes_are_no_reason_for_a_tiny_stage():
    assert balanced([1, 7, 8, 8, 24], [1, 100, 100, 100], 3) == [2, 4]
    assert balanced([4, 4, 8, 8, 24], [1, 100, 100, 100], 3) == [1, 4]
