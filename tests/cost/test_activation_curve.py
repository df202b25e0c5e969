"""Memory of one micro-batch over time, and of several that are shifted."""

from dataclasses import replace
from fractions import Fraction
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.thorough import more
from toolkit.cost import AXES, Hardware, memory_curve, profile
from toolkit.cost.activation_curve import _curve
from toolkit.errors import UserError
from toolkit.model import build, partition

FLOAT = 4
A100 = Hardware("A100", flops=156e12, memory_bandwidth=2.04e12, link_bandwidth=300e9)
ARITHMETIC = Hardware(
    "no memory wall", flops=1.0, memory_bandwidth=inf, link_bandwidth=1.0
)
MEMORY = Hardware("no arithmetic", flops=inf, memory_bandwidth=1.0, link_bandwidth=1.0)


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def images(n, size=224):
    return torch.empty(n, 3, size, size, device="meta")


@st.composite
def curves(draw, most=20):
    """Whole times and bytes, so that nothing is rounded."""
    levels = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6).filter(any))
    durations = st.lists(
        st.integers(0, most), min_size=2 * len(levels), max_size=2 * len(levels)
    )
    lasting = durations.filter(lambda d: d[levels.index(max(levels))])
    return _curve(draw(lasting), [*levels, *reversed(levels)])


def test_two_layers_by_hand():
    """The ReLU's output is all that is kept: from the ReLU, which takes no flops, on."""
    curve = memory_curve(two_layers(), torch.empty(5, 3, device="meta"), axis="flops")
    first, second = 2 * 5 * 3 * 4, 2 * 5 * 4 * 2
    assert np.diff(curve.edges).tolist() == [first, second, 2 * second, first]
    assert curve.levels.tolist() == [0, 5 * 4 * FLOAT, 5 * 4 * FLOAT, 0]
    assert curve.peak == 80
    assert curve.mean == 80 * 240 / 480
    assert curve.largest_reduction == 0.5


@pytest.mark.parametrize(
    ("axis", "hardware"), [("flops", ARITHMETIC), ("bytes", MEMORY)]
)
def test_the_roofline_of_one_sided_machines(axis, hardware):
    example = images(2, 32)
    one_sided = memory_curve(build("resnet8", 10, 32), example, "roofline", hardware)
    curve = memory_curve(build("resnet8", 10, 32), example, axis)
    assert np.array_equal(one_sided.edges, curve.edges)
    assert np.array_equal(one_sided.levels, curve.levels)


def test_the_backward_mirrors_the_forward():
    model, example = build("resnet8", 10, 32), images(2, 32)
    levels = memory_curve(model, example, "roofline", A100).levels
    up = [level for k, level in enumerate(levels) if k == 0 or level != levels[k - 1]]
    assert up == up[::-1]
    (whole,) = profile(partition(model, 1, example), example)
    assert levels.max() == whole.activation_bytes
    assert np.all(np.diff(levels[: int(np.argmax(levels)) + 1]) >= 0)


@given(curves(), st.integers(1, 7))
@settings(deadline=None)
def test_the_total_of_shifted_workers_by_brute_force(curve, n):
    """Every change is at a multiple of 1/n: between two of them one sample tells all."""
    period = int(curve.edges[-1])
    times, total = curve.shifted(n)
    assert np.all(np.diff(times) > 0)
    assert times[0] == 0
    assert times[-1] < period
    for sample in range(period * n):
        when = Fraction(2 * sample + 1, 2 * n)
        expected = 0
        for k in range(n):
            own = (when - Fraction(k * period, n)) % period
            expected += curve.levels[
                next(i for i, end in enumerate(curve.edges[1:]) if own < end)
            ]
        assert total[np.searchsorted(times, float(when), side="right") - 1] == expected


@given(curves(), st.integers(1, 32))
@settings(deadline=None)
def test_the_mean_of_the_total(curve, n):
    times, total = curve.shifted(n)
    mean = np.average(total, weights=np.diff(times, append=curve.edges[-1]))
    assert mean == pytest.approx(n * curve.mean)
    assert curve.reduction(n) <= curve.largest_reduction + 1e-9
    assert curve.reduction(1) == 0
    # the total of 64 workers is off its mean by less than one worker's changes
    swings = np.abs(np.diff(curve.levels, append=curve.levels[0])).sum()
    assert (
        curve.reduction(64)
        >= curve.largest_reduction - swings / (64 * curve.peak) - 1e-9
    )


@pytest.mark.parametrize("slot", [1.0, 0.1, 1 / 3, 7e-7])
@pytest.mark.parametrize("n", [2, 3, 10, 16])
def test_equal_stages_halve_the_memory(n, slot):
    """N(N+1)/2 of N*N, whatever the rounding of times that fall together."""
    # N equal stages: 1, 2, .. n, n, .. 1 activations, a slot each.
    kept = [*range(1, n + 1)]
    curve = _curve([slot] * (2 * n), [*kept, *reversed(kept)])
    times, total = curve.shifted(n)
    assert len(times) == 2 * n
    assert set(total) == {n * (n + 1) / 2}
    assert curve.reduction(n) == pytest.approx(1 - (n + 1) / (2 * n))


@pytest.mark.parametrize(
    ("name", "axis", "expected"),
    [
        ("resnet50", "flops", 0.303),  # the paper's 30 %
        ("vit_b_16", "roofline", 0.497),  # above the paper's 42 %
        *more([], [("resnet50", "roofline", 0.425), ("vit_b_16", "flops", 0.493)]),
    ],
)
def test_the_papers_figure(name, axis, expected):
    with torch.device("meta"):
        model = build(name, n_classes=1000, image_size=224)
    curve = memory_curve(model, images(32), axis, A100)
    assert curve.reduction(32) == pytest.approx(expected, abs=0.003)
    assert curve.reduction(32) <= curve.largest_reduction <= 0.5
    assert curve.reduction(64) == pytest.approx(curve.largest_reduction, abs=0.01)


def test_the_measured_axis():
    model = nn.Sequential(build("resnet8", 10, 16), nn.Dropout(0.5)).eval()
    example = torch.randn(2, 3, 16, 16)
    generator = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    curve = memory_curve(model, example, "measured")
    assert curve.peak == memory_curve(model, example, "bytes").peak
    assert np.all(np.diff(curve.edges) > 0)
    assert 0 < curve.reduction(8) <= curve.largest_reduction + 1e-9
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )
    assert not model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layers", "options", "value"),
    [
        (
            [nn.Linear(3, 4), nn.ReLU()],
            {"axis": "seconds"},
            f"'seconds'.*{', '.join(AXES)}",
        ),
        ([nn.Linear(3, 4), nn.ReLU()], {"axis": "roofline"}, "hardware"),
        ([nn.Linear(3, 4), nn.ReLU()], {"axis": "measured"}, "measured"),
        ([nn.Linear(3, 4), nn.ReLU()], {"precision": "int8"}, "'int8'"),
        ([nn.ReLU()], {"axis": "flops"}, "flops"),
        ([nn.Linear(3, 4)], {"axis": "bytes"}, "bytes"),
        # What is kept takes none.
        ([nn.Linear(3, 4), nn.Tanh()], {"axis": "flops"}, "flops"),
    ],
)
def test_rejects_what_has_no_curve(layers, options, value):
    with pytest.raises(UserError, match=value):
        memory_curve(
            nn.Sequential(*layers), torch.empty(5, 3, device="meta"), **options
        )


def test_in_16_bits_by_hand():
    """The input, the second weight and its input in 16 bits; the first weight is not needed."""
    example = torch.empty(5, 3, device="meta")
    curve = memory_curve(two_layers(), example, "flops", precision="bf16")
    assert curve.levels.tolist() == [30, 30 + 40 + 16, 30 + 40 + 16, 30]
    real = memory_curve(two_layers(), torch.zeros(5, 3), "measured", precision="bf16")
    assert real.peak == curve.peak
    machine = replace(ARITHMETIC, flops_in_16_bits=4.0)  # whose products are faster
    slow, fast = (
        memory_curve(two_layers(), example, "roofline", machine, precision)
        for precision in ("tf32", "fp16")
    )
    assert slow.edges[-1] == 4 * fast.edges[-1]
