"""What is done about late weights: they are predicted, or their gradients are compensated.

theta_v is the version that a stage reads for a micro-batch at step t, v <= t, and g its gradient.
"""

from dataclasses import dataclass

from toolkit.errors import UserError, check_choice

# Where none is given. Predictions go the whole way; 0.04 is lambda_0 of the paper on DC-ASGD. Only
# what corrects nothing has 0.
_STRENGTHS = {
    "none": 0.0,
    "extrapolate": 1.0,
    "optimizer_step": 1.0,
    "compensate": 0.04,
}
CORRECTIONS = tuple(_STRENGTHS)


@dataclass(frozen=True)
class Correction:
    """A correction of the weights that are read late, or of their gradients.

    Args:
        kind: ``none``, or one of those below; c is the ``strength``.

            ``extrapolate``: repeat the last update in each step since (SpecTrain, arXiv
            1809.02839). A rank holds the version before theta_v, and the prediction::

                theta_hat = theta_v + c (t - v) (theta_v - theta_{v-1}),   v > 0

            ``optimizer_step``: the same with the optimizer's last step, without decoupled weight
            decay w and at the learning rates lr of the steps since (PipeOptim, arXiv 2312.00839).
            It holds what ``extrapolate`` holds::

                theta_hat = theta_v + c (lr_v + ... + lr_{t-1}) / lr_{v-1}
                                      (theta_v - (1 - lr_{v-1} w) theta_{v-1}),   v > 0

            ``compensate``: a first-order estimate of the gradient at theta_t (DC-ASGD, arXiv
            1609.08326). The rank reads theta_t in the backward, which it may have to hold::

                g_hat = g + c g * g * (theta_t - theta_v)

        strength: the factor c, above 0. None: 1 for predictions; 0.04 for ``compensate``, as
            in its paper.

    Raises:
        UserError: an unknown kind, or a strength out of range.
    """

    kind: str = "none"
    strength: float | None = None

    def __post_init__(self) -> None:
        check_choice("correction", self.kind, CORRECTIONS)
        usual = _STRENGTHS[self.kind]
        c = usual if self.strength is None else self.strength
        if (
            isinstance(c, bool)
            or not isinstance(c, int | float)
            or not 0 <= c < float("inf")
        ):
            raise UserError(
                f"the strength of a correction is a number above 0: got {c!r}"
            )
        # Strength 0 would be no correction under the name of one; it would still hold and send its
        # weights.
        if (c > 0) != (usual > 0):
            raise UserError(
                f"correction={self.kind} with strength={c}: a strength is above 0, and"
                " correction=none takes no strength"
            )
        object.__setattr__(self, "strength", float(c))

    @property
    def c(self) -> float:
        """The strength as a number."""
        return self.strength or 0.0

    @property
    def predicts(self) -> bool:
        """Whether late weights are predicted."""
        return self.kind in ("extrapolate", "optimizer_step")

    @property
    def label(self) -> str:
        """A word for names of schedules; empty for none."""
        words = {
            "none": "",
            "extrapolate": "predicted",
            "optimizer_step": "predicted by optimizer",
        }
        word = words.get(self.kind, "compensated")
        return word if self.c == _STRENGTHS[self.kind] else f"{word} {self.c:g}"


def correction_of(value: "str | Correction") -> Correction:
    """Return the correction of a kind's name, or ``value`` itself; UserError for any other."""
    if isinstance(value, Correction):
        return value
    if not isinstance(value, str):
        raise UserError(
            f"correction: got {value!r}; expected one of {', '.join(CORRECTIONS)}, or a Correction"
        )
    return Correction(value)
