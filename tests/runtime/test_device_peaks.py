"""Peak memory of a device, simulated and measured, where ranks are one device or two."""

import pytest
import torch

from tests.runtime import device_peaks
from toolkit.cost import UNIT, profile, simulate
from toolkit.cost.tensor_width import Width, profile_width
from toolkit.model import partition
from toolkit.runtime import launch

WITHIN = 0.02


@pytest.fixture(scope="module")
def measured():
    """Living tensors on each of 4 processes over gloo."""
    return launch(device_peaks.peaks, 4)


def predicted(name, width=None):
    """The timeline of a case, or with another width, from stages on the meta device."""
    schedule, width_of_case = device_peaks.CASES[name]
    width = width or width_of_case
    with torch.device("meta"):
        model = device_peaks.decoder()
    tokens = torch.zeros(
        device_peaks.BATCH, device_peaks.TOKENS, dtype=torch.long, device="meta"
    )
    stages = partition(model, schedule.n_stages, tokens)
    if width == 1:
        costs = profile(stages, tokens)
    else:
        parallelize = device_peaks.parallelize_of(name, model)
        costs = profile_width(stages, tokens, parallelize, Width(width, UNIT))
    no_states = [0.0] * schedule.n_stages
    return simulate(schedule.lower(4).verify(), costs, UNIT, no_states)


@pytest.mark.parametrize("name", device_peaks.CASES)
def test_simulated_peaks_are_those_that_devices_have(measured, name):
    schedule, width = device_peaks.CASES[name]
    timeline = predicted(name)
    assert schedule.n_ranks * width == len(measured)
    for process, peaks in enumerate(measured):
        assert timeline.peak_memory(process // width) == pytest.approx(
            peaks[name], rel=WITHIN
        )


def test_two_devices_hold_less_than_one(measured):
    """The tolerance is far below what a width changes."""
    for name in device_peaks.CASES:
        _, width = device_peaks.CASES[name]
        if width == 1 or name.startswith("CDP"):
            continue  # CDP keeps a second version of the weights
        # Where devices share weights alone, activations are whole.
        share = 0.85 if name.endswith("shared weights") else 0.8
        whole = predicted(name, 1)
        for process, peaks in enumerate(measured):
            assert peaks[name] < share * whole.peak_memory(process // 2)
