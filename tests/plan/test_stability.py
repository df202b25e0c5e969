"""Certified rates against closed forms, published figures, and recurrences written out in full."""

from itertools import product
from math import pi, sin

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.plan.stability import (
    Certificate,
    Recurrence,
    coupling_of,
    largest_stable_rate,
)
from toolkit.schedule import Correction, RandomDelay, catalog


def corrected(predict):
    """Options of a schedule whose late weights are extrapolated, or not."""
    return {"correction": "extrapolate" if predict else "none"}


def delayed(n, delay, predict=False):
    return catalog.data_parallel(n, delay=delay, **corrected(predict))


def limit(schedule, momentum=0.9, nesterov=False, coupling=None):
    return largest_stable_rate(
        schedule, momentum=momentum, nesterov=nesterov, coupling=coupling
    ).limit


def spread(s, seed=0):
    """A random coupling of full rank, largest eigenvalue 1."""
    root = np.random.default_rng(seed).normal(size=(s, s))
    return root @ root.T / np.linalg.eigvalsh(root @ root.T)[-1]


PUBLISHED = {  # N = S = 8, momentum 0.9: heavy ball, Nesterov, predicted, both
    0: (3.80, 1.36, 3.80, 1.36),
    1: (0.10, 0.25, 0.27, 0.35),
    "freshest": (0.23, 0.92, 0.43, 0.59),
}


@pytest.mark.parametrize("delay", PUBLISHED)
def test_limits_of_the_rules_at_momentum_09(delay):
    found = [
        limit(catalog.cyclic(8, delay, **corrected(predict)) if delay else delayed(8, 0, predict),
              nesterov=nesterov)
        for predict in (False, True)
        for nesterov in (False, True)
    ]  # fmt: skip
    assert found == pytest.approx(PUBLISHED[delay], abs=0.0051)


@pytest.mark.parametrize(
    "coupling", [None, np.eye(3), spread(3)], ids=["all", "none", "random"]
)
def test_closed_forms_hold_for_every_coupling(coupling):
    for mu in (0, 0.5, 0.9):
        assert limit(delayed(3, 0), mu, coupling=coupling) == pytest.approx(
            2 + 2 * mu, rel=1e-4
        )
        nesterov = limit(delayed(3, 0), mu, nesterov=True, coupling=coupling)
        assert nesterov == pytest.approx((2 + 2 * mu) / (1 + 2 * mu), rel=1e-4)
    for k in (1, 2, 7, 30):  # gradient descent with a constant delay
        closed = 2 * sin(pi / (2 * (2 * k + 1)))
        assert limit(delayed(3, k), 0, coupling=coupling) == pytest.approx(
            closed, rel=1e-4
        )
    predicted = limit(delayed(3, 1, predict=True), 0, coupling=coupling)
    assert predicted == pytest.approx((5**0.5 - 1) / 2, rel=1e-4)


def test_larger_delays_have_smaller_limits():
    for mu, nesterov in product((0, 0.9), (False, True)):
        found = [limit(delayed(4, k), mu, nesterov) for k in range(6)]
        assert found == sorted(found, reverse=True)
        assert found[5] < found[1] / 3


def test_a_coupling_of_one_stage_has_the_limit_of_its_delays():
    rule = catalog.cyclic(4)
    for j in range(4):
        alone = delayed(4, [rule.staleness[j]] * 4)
        mode = coupling_of([float(k == j) for k in range(4)])
        assert limit(rule, coupling=mode) == pytest.approx(limit(alone), rel=1e-5)
    least = min(limit(rule, coupling=coupling_of(np.eye(4)[j])) for j in range(4))
    assert limit(rule, coupling=np.eye(4)) == pytest.approx(least, rel=1e-5)
    assert limit(rule) > least


def step_matrix(schedule, h, rate, mu, nesterov, ahead, delays):
    """The matrix of one step for all stages' versions and momenta, without any reduction."""
    s, m, late = schedule.n_stages, schedule.n_microbatches, schedule.max_staleness + 1
    size = (late + 2) * s
    read = np.zeros((s, size))
    for j, k in product(range(s), range(m)):
        d = delays[j][k]
        read[j, d * s + j] += (1 + ahead * d) / m
        read[j, (d + 1) * s + j] -= ahead * d / m
    newest, momentum = np.eye(size)[:s], np.eye(size)[-s:]
    gradient = h @ read
    velocity = mu * momentum + gradient
    moved = gradient + mu * velocity if nesterov else velocity
    return np.vstack([newest - rate * moved, np.eye(size)[: late * s], velocity])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("delay", [[[2, 0], [1, 3], [0, 1]], 1])
def test_agrees_with_the_recurrence_of_all_stages(delay, predict, nesterov):
    schedule = catalog.data_parallel(2, n_stages=3, delay=delay, **corrected(predict))
    h, mu = spread(3), 0.8
    best = limit(schedule, mu, nesterov, h)
    recurrence = Recurrence(schedule, mu, nesterov, h)
    for rate, stable in ((best * 0.999, True), (best * 1.001, False)):
        full = step_matrix(schedule, h, rate, mu, nesterov, predict, schedule.staleness)
        radius = np.abs(np.linalg.eigvals(full)).max()
        assert (radius < 1) == stable
        assert recurrence.growth(rate) == pytest.approx(radius, rel=1e-9)


def test_flat_directions_do_not_count():
    """Two stages that only act together: their difference never moves, and is no instability."""
    assert limit(catalog.cyclic(2, 1), 0) == pytest.approx(1, rel=1e-4)
    h, deviation = np.ones((2, 2)) / 2, np.tile([1.0, 0.5], 4)
    step = step_matrix(catalog.cyclic(2, 1), h, 0.5, 0, False, 0, [[1, 1], [1, 1]])
    for _ in range(200):
        deviation = step @ deviation
    assert deviation[:2] == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("per", ["microbatch", "stage", "step"])
@pytest.mark.parametrize("h", [np.ones((2, 2)) / 2, spread(2)], ids=["all", "random"])
@pytest.mark.parametrize("predict", [False, True])
def test_random_delays_in_mean_square_are_exact(per, h, predict):
    """The operator on second moments, summed over every outcome of the draws."""
    delay = RandomDelay("geometric", most=2, p=0.4, per=per)
    schedule = delayed(2, delay, predict)
    found = largest_stable_rate(schedule, momentum=0.5, coupling=h)
    assert found.kind == "mean square"
    n_draws = {"microbatch": 4, "stage": 2, "step": 1}[per]
    basis = np.linalg.svd(h)[0][:, : np.linalg.matrix_rank(h)]
    into = np.kron(np.eye(5), basis)  # without the directions that never move
    for rate, stable in ((found.limit * 0.995, True), (found.limit * 1.005, False)):
        operator = 0
        for draw in product(range(3), repeat=n_draws):
            p = np.prod([delay.probabilities[d] for d in draw])
            drawn = (
                np.resize(draw, (2, 2))
                if per != "stage"
                else np.repeat(draw, 2).reshape(2, 2)
            )
            a = (
                into.T
                @ step_matrix(schedule, h, rate, 0.5, False, predict, drawn)
                @ into
            )
            operator = operator + p * np.kron(a, a)
        assert (np.abs(np.linalg.eigvals(operator)).max() < 1) == stable


def test_random_delays_are_stricter_than_their_mean_distribution():
    mean = delayed(4, [[0, 1, 0, 1]] * 4)
    limits = [
        limit(delayed(4, RandomDelay(per=per)), 0)
        for per in ("microbatch", "stage", "step")
    ]
    assert limit(mean, 0) > limits[0] > limits[1] > limits[2]
    sure = limit(delayed(4, RandomDelay(least=1, most=1)))
    assert sure == pytest.approx(limit(delayed(4, 1)), rel=1e-5)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_corrections_count_to_first_order(momentum):
    """The optimizer's step moves as an extrapolation; compensation has no linear part."""
    rules = "none", "compensate", "extrapolate", "optimizer_step"
    found = [limit(catalog.cyclic(4, 1, correction=kind), momentum) for kind in rules]
    assert found[0] == found[1] != found[2] == found[3]
    half = limit(
        catalog.cyclic(4, 1, correction=Correction("extrapolate", 0.5)), momentum
    )
    assert min(found) < half < max(found) or half > max(found)
    assert half != pytest.approx(found[2], rel=0.01)


def test_probabilities_of_random_delays():
    assert RandomDelay("geometric", 1, 3, p=0.5).probabilities == pytest.approx(
        (4 / 7, 2 / 7, 1 / 7)
    )
    drawn = RandomDelay("poisson", 0, 4, mean=1.5)
    expected = sum(
        d * p for d, p in zip(drawn.values, drawn.probabilities, strict=True)
    )
    assert expected == pytest.approx(drawn.expected)


def test_rate_at_a_curvature():
    found = largest_stable_rate(delayed(2, 0), momentum=0.9, nesterov=True)
    assert found.kind == "exact"
    assert found.rate(10) == pytest.approx(found.limit / 10)
    assert found.rate(0) == found.rate(-1) == float("inf")
    assert isinstance(found, Certificate)


@pytest.mark.parametrize(
    ("momentum", "coupling", "message"),
    [
        (1, None, "momentum is 0 or more, below 1: got 1"),
        (0, np.ones((3, 3)), "2 x 2 finite numbers"),
        (0, [[1, 2], [0, 1]], "symmetric matrix"),
        (0, [[1, 0], [0, -1]], "no negative eigenvalues"),
        (0, np.zeros((2, 2)), "one above 0"),
    ],
)
def test_refuses_other_numbers(momentum, coupling, message):
    with pytest.raises(UserError, match=message):
        largest_stable_rate(delayed(2, 0), momentum=momentum, coupling=coupling)
