"""Largest stable learning rate of delayed training, from the eigenvalues of its recurrence.

Near a minimum the loss is quadratic. The stages' coordinates theta = (theta^1, .., theta^S) have
the loss 1/2 theta^T H theta, with largest curvature lambda; by default H = lambda/S 1 1^T, which
couples all stages equally. A training step with the rate eta and momentum mu is::

    g_t     = H 1/M sum_m theta_hat_{m,t}
    v_{t+1} = mu v_t + g_t
    theta_{t+1} = theta_t - eta v_{t+1}                 heavy ball
    theta_{t+1} = theta_t - eta (g_t + mu v_{t+1})      Nesterov

as torch.optim.SGD updates. Of stage j theta_hat_{m,t} is theta^j_v with v = t - staleness[j][m],
or its extrapolation theta^j_v + s (t - v) (theta^j_v - theta^j_{v-1}) if t > v. The gradient lies
in the range of H, so theta_t = theta_0 + U c_t with orthonormal columns U that span it, and c
follows a linear recurrence. The rate is stable if all eigenvalues of the recurrence's companion
matrix are within the unit circle: then c_t converges, to a minimum, from every start. Coordinates
outside the range of H never move. With the default H, U has one column, and only the mean delay
distribution over stages and micro-batches counts.

Delays that are drawn anew at every step make the matrix random. The rate is stable in mean square
if E |c_t - c|^2 converges to 0, which implies convergence with probability 1 and is
stricter. With A the mean matrix, deviations of stage l that are independent of other stages', and
their covariance C, the second moments P follow::

    P_{t+1} = A P_t A^T + sum_l b_l b_l^T trace(C E_l P_t E_l^T)

where E_l takes the versions of stage l out of the state and b_l is what its deviations move. It
converges if and only if A is stable and the matrix of gains G[l, k] = trace(C E_l P_k E_l^T) has
a spectral radius below 1, where P_k = sum_i A^i b_k b_k^T (A^T)^i: an exact condition.

Source: for one constant delay, Giladi et al., "At Stability's Edge", arXiv 1909.12340.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from toolkit.errors import UserError
from toolkit.schedule import RandomDelay, Schedule

Matrix = NDArray[np.floating]

_SCAN = 1.05  # from a rate to the next one that is looked at
_PRECISION = 1e-6  # of the limit
_NEUTRAL = 1e-10  # by which rounding may move an eigenvalue
_FLAT = 1e-9  # share of the largest curvature below which a direction counts as flat
_MOST = 1e4  # limits above count as none


@dataclass(frozen=True)
class Certificate:
    """How large a learning rate is stable under a schedule.

    Attributes:
        limit: largest learning rate times largest curvature, below which all are stable.
        kind: ``exact`` for the quadratic loss; ``mean square``, if delays are random.
        schedule: name of the schedule.
        momentum: of SGD.
        nesterov: whether SGD looks ahead.
    """

    limit: float
    kind: Literal["exact", "mean square"]
    schedule: str
    momentum: float
    nesterov: bool

    def rate(self, curvature: float) -> float:
        """Return the largest stable learning rate at ``curvature``, the top Hessian eigenvalue."""
        if curvature <= 0:
            return inf
        return self.limit / curvature


def largest_stable_rate(
    schedule: Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    coupling: ArrayLike | None = None,
) -> Certificate:
    """Certify the largest stable rate of SGD under ``schedule``; see this module.

    Rates are scanned upwards in steps of 5 %, and the first that is unstable is bisected.

    Args:
        schedule: its delays and corrections count, not its timing or placement; of schedules that
            follow one another, the last.
        momentum: 0 or more, below 1.
        nesterov: Nesterov's momentum instead of heavy ball.
        coupling: H, ``[S, S]``, symmetric without negative eigenvalues; only its ratios count.
            None: every stage is coupled to every stage, equally.

    Raises:
        UserError: momentum is out of range, or the coupling is no such matrix.
    """
    return Recurrence(schedule, momentum, nesterov, coupling).certify()


@dataclass(frozen=True)
class Recurrence:
    """The linear recurrence of a schedule on a quadratic loss of largest curvature 1.

    The state holds c of the newest versions, newest first, then the momentum; see this module for
    the equations. Arguments as of :func:`largest_stable_rate`.
    """

    schedule: Schedule
    momentum: float = 0.0
    nesterov: bool = False
    coupling: ArrayLike | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum is 0 or more, below 1: got {self.momentum}")

    @cached_property
    def noise(self) -> Matrix | None:
        """Covariance of what one draw reads, ``[versions, versions]``; None without draws."""
        delay = self.schedule.delay
        if not isinstance(delay, RandomDelay):
            return None
        share_rows = np.stack([*map(self._row, delay.values)])
        probabilities = np.array(delay.probabilities)
        deviations = share_rows - probabilities @ share_rows
        covariance: Matrix = deviations.T @ np.diag(probabilities) @ deviations
        if delay.per == "microbatch":  # a step takes the mean of independent draws
            return covariance / self.schedule.n_microbatches
        return covariance

    @cached_property
    def reads(self) -> Matrix:
        """``[stage, version]``: mean share of each version in what a stage reads, newest first."""
        delay = self.schedule.delay
        if isinstance(delay, RandomDelay):
            mean = 0 * self._row(0)
            for steps, probability in zip(
                delay.values, delay.probabilities, strict=True
            ):
                mean = mean + probability * self._row(steps)
            return np.tile(mean, (len(self._modes[0]), 1))
        rows = [[*map(self._row, delays)] for delays in self.schedule.staleness]
        return np.mean(rows, axis=1)

    def certify(self) -> Certificate:
        """Find the largest stable rate; see :func:`largest_stable_rate`."""
        max_staleness = self.schedule.max_staleness
        # A rough limit: delay, extrapolation and momentum each lower it. The scan begins a hundred
        # times below, and lower still if that is not stable.
        slowness = (1 + max_staleness) * (
            1 + extrapolation(self.schedule) * max_staleness
        )
        small_rate = 0.01 * (1 - self.momentum) / slowness
        limit = _first_unstable(
            lambda rate: self.growth(rate) < 1 + _NEUTRAL, small_rate
        )
        kind: Literal["exact", "mean square"] = "exact"
        if self.noise is not None:
            kind = "mean square"
        return Certificate(
            limit, kind, self.schedule.name, self.momentum, self.nesterov
        )

    def growth(self, rate: float) -> float:
        """Factor by which deviations grow in a training step at ``rate``; stable below 1.

        At another largest curvature, ``rate`` is the learning rate times that. With random delays
        it is the larger of that of the mean, and of the gain of the noise.
        """
        modes, curvatures = self._modes
        momentum = self.momentum
        momentum_factor = gradient_factor = 1.0
        if self.nesterov:
            momentum_factor = momentum
            gradient_factor = 1 + momentum
        state_size = self.reads.shape[1] + 1
        n_modes = len(curvatures)

        # 1. What a step does without a gradient, from one state to the next::
        #
        #     newest version   | 1 0 .. 0  -rate mu f |    moves by the momentum
        #     older versions   | 1 0 .. 0   0         |    are what was newer a step before
        #                      | 0 1 .. 0   0         |
        #     momentum         | 0 0 .. 0   mu        |
        shift = np.eye(state_size, k=-1)
        shift[0, 0] = 1
        shift[0, -1] = -rate * momentum * momentum_factor
        shift[-1, -2:] = (0, momentum)
        # Each version is `n_modes` entries of the state, next to each other.
        matrix = np.kron(shift, np.eye(n_modes))

        # 2. The gradient moves the newest version and the momentum.
        gradient_effect = np.zeros((state_size, 1))
        gradient_effect[0] = -rate * gradient_factor
        gradient_effect[-1] = 1
        for version, share in enumerate(self.reads.T):
            version_row = np.eye(1, state_size, version)
            matrix += np.kron(
                gradient_effect @ version_row,
                curvatures[:, None] * (modes.T * share) @ modes,
            )
        radius = _radius(matrix)
        if self.noise is None or radius >= 1:
            return radius
        # Letters of the sum below: d and e are versions, a and b modes; k is the stage whose
        # deviations move the state, and l the stage that reads it.
        # 3. The gains of the noise. The sums of moments exist, since the mean is stable.
        noise_effect = np.stack(
            [np.kron(gradient_effect, (curvatures * row)[:, None]) for row in modes]
        )
        moments = _moments(matrix, noise_effect @ noise_effect.mT).reshape(
            -1, state_size, n_modes, state_size, n_modes
        )[:, :-1, :, :-1]
        # Moments of the momentum, which is last in the state, were left out: no stage reads it.
        gains = np.einsum("de,kdaeb,la,lb->lk", self.noise, moments, modes, modes)
        return max(radius, _radius(gains))

    def _row(self, delay: int) -> Matrix:
        """Return the share of each version in a read that is ``delay`` steps late."""
        factor = extrapolation(self.schedule)
        shares = np.zeros(self.schedule.max_staleness + 1 + (factor > 0))
        shares[delay] = 1
        if factor and delay:
            shares[delay : delay + 2] += factor * delay, -factor * delay
        return shares

    @cached_property
    def _modes(self) -> tuple[Matrix, Matrix]:
        """Orthonormal columns U that span the range of H, and its eigenvalues; the largest is 1."""
        n_stages = self.schedule.n_stages
        delay = self.schedule.delay
        coupling = np.ones((n_stages, n_stages))
        if self.coupling is not None:
            coupling = np.array(self.coupling, float)
        if (
            coupling.shape != (n_stages, n_stages)
            or not np.isfinite(coupling).all()
            or not np.allclose(coupling, coupling.T)
        ):
            raise UserError(
                f"coupling is a symmetric matrix of {n_stages} x {n_stages} finite numbers: got"
                f" {coupling.shape}"
            )
        values, vectors = np.linalg.eigh(coupling)
        if not values[-1] > 0 or values[0] < -1e-6 * values[-1]:
            raise UserError(
                f"coupling has no negative eigenvalues, and one above 0: got {values}"
            )
        if isinstance(delay, RandomDelay) and delay.per == "step":
            # Equal reads: modes are apart, the largest decides.
            return np.ones((1, 1)), np.ones(1)
        is_curved = values > _FLAT * values[-1]
        return vectors[:, is_curved], values[is_curved] / values[-1]


def extrapolation(schedule: Schedule) -> float:
    """Factor on the extrapolation of late weights, to first order in their deviation; 0: none.

    A step of SGD is linear in the versions, so the optimizer's own step extrapolates as the last
    update does. Delay compensation is of second order.
    """
    return schedule.corrected.c if schedule.corrected.predicts else 0.0


def _radius(matrix: Matrix) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def _moments(a: Matrix, q: Matrix) -> Matrix:
    """Return the sum over i of A^i Q (A^T)^i for each Q of ``q``, by doubling; A is stable."""
    for _ in range(64):
        # After k rounds q sums the first 2^k terms, and a is A to the power of 2^k.
        terms = a @ q @ a.T
        q, a = q + terms, a @ a
        # A is stable, so the terms shrink, the faster the more rounds have passed.
        if np.abs(terms).max() <= 1e-12 * np.abs(q).max():
            break
    return q


def _first_unstable(stable: Callable[[float], bool], stable_rate: float) -> float:
    """Return the rate below which all scanned rates are stable.

    The scan begins at ``stable_rate``, which shrinks if it is not stable itself.
    """
    # Upwards from a stable rate: above the first unstable one others may be stable again, and a
    # certificate must not reach over a gap.
    while not stable(stable_rate):
        stable_rate /= 10
        if stable_rate < 1e-15:
            return 0.0
    unstable_rate = stable_rate * _SCAN
    while stable(unstable_rate):
        stable_rate = unstable_rate
        if stable_rate > _MOST:
            return inf
        unstable_rate = stable_rate * _SCAN
    while unstable_rate > stable_rate * (1 + _PRECISION):
        # The geometric mean, since the precision is relative.
        middle_rate = (stable_rate * unstable_rate) ** 0.5
        if stable(middle_rate):
            stable_rate = middle_rate
        else:
            unstable_rate = middle_rate
    return stable_rate


def coupling_of(shares: Sequence[float]) -> Matrix:
    """H of one mode in which stage j has ``shares[j]`` of the squared norm.

    Args:
        shares: of each stage, as :class:`toolkit.plan.curvature.Curvature` has them; sum 1.
    """
    mode = np.sqrt(np.array(shares, float))
    return np.outer(mode, mode)
