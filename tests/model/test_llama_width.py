"""A Llama as users write it, with the plan of torch's tutorial, on ranks of two devices."""

import pytest
import torch

from tests.model import small_llama
from tests.runtime.models import assert_same
from toolkit.runtime import launch


@pytest.fixture(scope="module")
def on_devices():
    return launch(small_llama.on_devices, 4)


@pytest.mark.parametrize("name", small_llama.CASES)
def test_follows_the_single_process(on_devices, name):
    expected, expected_losses = small_llama.in_one_process(name)
    for found in on_devices:
        state, _ = found[name]
        assert_same(state, expected)
    for step, losses in enumerate(expected_losses):
        # Each sample's loss is on one rank or on every one; all devices of a rank have it.
        in_column = [found[name][1][step] for found in on_devices[::2]]
        merged = torch.cat([loss for loss in in_column if len(loss)]).sort().values
        torch.testing.assert_close(merged, losses.sort().values, rtol=0, atol=1e-10)
