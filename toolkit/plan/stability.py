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
        return self.limit / curvature if curvature > 0 else inf


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
        if not isinstance(delay := self.schedule.delay, RandomDelay):
            return None
        rows, p = np.stack([self._row(d) for d in delay.values]), np.array(delay.probabilities)
        mean = p @ rows
        covariance: Matrix = (rows - mean).T @ np.diag(p) @ (rows - mean)
        return covariance / (self.schedule.n_microbatches if delay.per == "microbatch" else 1)

    @cached_property
    def reads(self) -> Matrix:
        """``[stage, version]``: mean share of each version in what a stage reads, newest first."""
        if isinstance(delay := self.schedule.delay, RandomDelay):
            terms = zip(delay.values, delay.probabilities, strict=True)
            mean = sum((p * self._row(d) for d, p in terms), start=self._row(0) * 0)
            return np.tile(mean, (len(self._modes[0]), 1))
        rows = [[self._row(d) for d in delays] for delays in self.schedule.staleness]
        return np.mean(rows, axis=1)

    def certify(self) -> Certificate:
        """Find the largest stable rate; see :func:`largest_stable_rate`."""
        late, ahead = self.schedule.max_staleness, extrapolation(self.schedule)
        small = 0.01 * (1 - self.momentum) / ((1 + late) * (1 + ahead * late))
        limit = _first_unstable(lambda rate: self.growth(rate) < 1 + _NEUTRAL, small)
        kind: Literal["exact", "mean square"] = "exact" if self.noise is None else "mean square"
        return Certificate(limit, kind, self.schedule.name, self.momentum, self.nesterov)

    def growth(self, rate: float) -> float:
        """Factor by which deviations grow in a training step at ``rate``; stable below 1.

        At another largest curvature, ``rate`` is the learning rate times that. With random delays
        it is the larger of that of the mean, and of the gain of the noise.
        """
        u, curvatures = self._modes
        mu, ahead = self.momentum, self.momentum if self.nesterov else 1.0
        n, r = self.reads.shape[1] + 1, len(curvatures)
        shift = np.eye(n, k=-1)  # each version becomes a step older
        shift[0, 0], shift[0, -1], shift[-1, -2:] = 1, -rate * mu * ahead, (0, mu)
        moved = np.zeros((n, 1))  # by the gradient: the newest version and the momentum
        moved[0], moved[-1] = -rate * (1 + mu if self.nesterov else 1), 1
        a = np.kron(shift, np.eye(r))
        for d, share in enumerate(self.reads.T):
            at = np.eye(1, n, d)
            a += np.kron(moved @ at, curvatures[:, None] * (u.T * share) @ u)
        radius = _radius(a)
        if self.noise is None or radius >= 1:
            return radius
        b = np.stack([np.kron(moved, (curvatures * row)[:, None]) for row in u])
        moments = _moments(a, b @ b.mT).reshape(-1, n, r, n, r)[:, :-1, :, :-1]
        gains = np.einsum("de,kdaeb,la,lb->lk", self.noise, moments, u, u)
        return max(radius, _radius(gains))

    def _row(self, delay: int) -> Matrix:
        """The share of each version in a read that is ``delay`` steps late."""
        s = extrapolation(self.schedule)
        row = np.zeros(self.schedule.max_staleness + 1 + (s > 0))
        row[delay] = 1
        if s and delay:
            row[delay : delay + 2] += s * delay, -s * delay
        return row

    @cached_property
    def _modes(self) -> tuple[Matrix, Matrix]:
        """Orthonormal columns U that span the range of H, and its eigenvalues; the largest is 1."""
        s, delay = self.schedule.n_stages, self.schedule.delay
        h = np.ones((s, s)) if self.coupling is None else np.array(self.coupling, float)
        if h.shape != (s, s) or not np.isfinite(h).all() or not np.allclose(h, h.T):
            raise UserError(
                f"coupling is a symmetric matrix of {s} x {s} finite numbers: got {h.shape}"
            )
        values, vectors = np.linalg.eigh(h)
        if not values[-1] > 0 or values[0] < -1e-6 * values[-1]:
            raise UserError(f"coupling has no negative eigenvalues, and one above 0: got {values}")
        if isinstance(delay, RandomDelay) and delay.per == "step":
            return np.ones((1, 1)), np.ones(1)  # equal reads: modes are apart, the largest decides
        kept = values > _FLAT * values[-1]
        return vectors[:, kept], values[kept] / values[-1]


def extrapolation(schedule: Schedule) -> float:
    """Factor on the extrapolation of late weights, to first order in their deviation; 0: none.

    A step of SGD is linear in the versions, so the optimizer's own step extrapolates as the last
    update does. Delay compensation is of second order.
    """
    return schedule.corrected.c if schedule.corrected.predicts else 0.0


def _radius(matrix: Matrix) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def _moments(a: Matrix, q: Matrix) -> Matrix:
    """Sum over i of A^i Q (A^T)^i for each Q of ``q``, by doubling; A is stable."""
    for _ in range(64):
        more = a @ q @ a.T
        q, a = q + more, a @ a
        if np.abs(more).max() <= 1e-12 * np.abs(q).max():
            break
    return q


def _first_unstable(stable: Callable[[float], bool], small: float) -> float:
    """Return the rate, from ``small`` on, below which every rate that is looked at is stable."""
    while not stable(small):
        small /= 10
        if small < 1e-15:
            return 0.0
    while stable(large := small * _SCAN):
        small = large
        if small > _MOST:
            return inf
    while large > small * (1 + _PRECISION):
        middle = (small * large) ** 0.5
        small, large = (middle, large) if stable(middle) else (small, middle)
    return small


def coupling_of(shares: Sequence[float]) -> Matrix:
    """H of one mode in which stage j has ``shares[j]`` of the squared norm.

    Args:
        shares: of each stage, as :class:`toolkit.plan.curvature.Curvature` has them; sum 1.
    """
    mode = np.sqrt(np.array(shares, float))
    return np.outer(mode, mode)
