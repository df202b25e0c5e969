"""Workspace of libraries, measured by a stand-in for a GPU's allocator: torch's living tensors."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.library_memory import BACKWARD, FORWARD, LibraryMemory
from toolkit.cost import profile
from toolkit.cost.library_workspace import add_library_workspace
from toolkit.errors import UserError
from toolkit.model import build, partition


def measured(stages, images, workspaces, precision="fp32"):
    costs = profile(stages, images, precision=precision, repeats=1)
    with LibraryMemory(workspaces) as memory:
        return costs, add_library_workspace(costs, stages, images, precision, memory)


def working(costs):
    return [(cost.forward_working_bytes, cost.backward_working_bytes) for cost in costs]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_workspace_stages_work_with_what_meta_tensors_say(precision):
    torch.manual_seed(0)
    stages = partition(build("resnet8", 10, 16), 3, torch.randn(2, 3, 16, 16))
    costs, with_workspace = measured(stages, torch.randn(2, 3, 16, 16), {}, precision)
    for predicted, of_device in zip(
        working(costs), working(with_workspace), strict=True
    ):
        assert of_device == pytest.approx(predicted, rel=0.01)
    # Nothing else of a cost changes.
    unset = {"forward_working_bytes": 0.0, "backward_working_bytes": 0.0}
    for cost, other in zip(costs, with_workspace, strict=True):
        assert replace(cost, **unset) == replace(other, **unset)


def test_workspace_adds_to_the_stage_that_takes_it():
    """A stage of one convolution, whose operation meets all that it keeps, and a linear stage."""
    images = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)
    )
    stages = partition(model, 2, images)
    costs, with_workspace = measured(stages, images, {FORWARD: 10**6, BACKWARD: 10**7})
    convolutional, linear = working(costs)
    forward, backward = convolutional
    assert working(with_workspace) == [(forward + 10**6, backward + 10**7), linear]


def test_workspace_beside_less_than_is_kept_adds_less():
    """At its convolution, the forward of a stage does not keep yet what ReLU and the next save."""
    images = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)
    )
    stages = partition(model, 1, images)
    ((plain, _),) = working(measured(stages, images, {})[0])
    ((with_workspace, _),) = working(measured(stages, images, {FORWARD: 10**6})[1])
    one_result = 4 * 2 * 4 * 6 * 6
    # Kept at the end: the result of the sigmoid. At the convolution: its own, and the workspace.
    assert plain == one_result
    assert with_workspace == one_result + 10**6 - one_result


def test_an_example_on_a_cpu_is_refused():
    images = torch.randn(2, 3, 16, 16)
    stages = partition(build("resnet8", 10, 16), 2, images)
    with pytest.raises(UserError, match="got an example on cpu; expected cuda"):
        add_library_workspace(profile(stages, images, repeats=1), stages, images)
