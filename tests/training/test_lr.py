"""Learning rates, as literal numbers."""

from math import inf, nan

import pytest

from toolkit.errors import UserError
from toolkit.training.lr import Constant, Cosine, Step


def factors(rate, epochs, steps_per_epoch=1, batch=64):
    return [
        round(rate.factor(step, steps_per_epoch, epochs, batch), 6)
        for step in range(epochs * steps_per_epoch)
    ]


@pytest.mark.parametrize(
    ("rate", "epochs", "steps_per_epoch", "expected"),
    [
        (Constant(), 3, 2, [1, 1, 1, 1, 1, 1]),
        (Constant(warmup_epochs=2), 3, 2, [0.25, 0.5, 0.75, 1, 1, 1]),
        (Constant(warmup_epochs=0.5), 1, 4, [0.5, 1, 1, 1]),
        (Constant(warmup_epochs=4), 2, 1, [0.25, 0.5]),
        (Step(every_epochs=2, gamma=0.1), 5, 1, [1, 1, 0.1, 0.1, 0.01]),
        (Step(every_epochs=1, gamma=0.2), 3, 2, [1, 1, 0.2, 0.2, 0.04, 0.04]),
        (Step(warmup_epochs=1, every_epochs=1, gamma=0.5), 2, 2, [0.5, 1, 0.5, 0.5]),
        (Cosine(), 4, 1, [1, 0.853553, 0.5, 0.146447]),
        (Cosine(final=0.2), 2, 1, [1, 0.6]),
        (Cosine(warmup_epochs=1), 3, 1, [1, 1, 0.5]),
        (Cosine(warmup_epochs=1), 1, 4, [0.25, 0.5, 0.75, 1]),
        (Cosine(warmup_epochs=2), 1, 4, [0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_factors(rate, epochs, steps_per_epoch, expected):
    assert factors(rate, epochs, steps_per_epoch) == expected


@pytest.mark.parametrize(("batch", "scale"), [(256, 1), (512, 2), (64, 0.25)])
def test_scales_with_the_batch(batch, scale):
    rate = Step(reference_batch=256, warmup_epochs=1, every_epochs=1, gamma=0.1)
    found = factors(rate, epochs=2, steps_per_epoch=2, batch=batch)
    assert found == pytest.approx([0.5 * scale, scale, 0.1 * scale, 0.1 * scale])


@pytest.mark.parametrize(
    ("rate", "option", "value"),
    [
        (Constant, "warmup_epochs", -1),
        (Step, "warmup_epochs", inf),
        (Cosine, "reference_batch", 0),
        (Step, "every_epochs", 0),
        (Step, "gamma", nan),
        (Cosine, "final", nan),
    ],
)
def test_refuses(rate, option, value):
    with pytest.raises(UserError, match=rf"lr\.{option} .* {value}"):
        rate(**{option: value})
