"""A model may return scalars, such as its loss, and pass them from stage to stage."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model import check_independent, partition
from toolkit.model.traced_stage import one_by_one

ROWS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 2, 1, 2])


class Judged(nn.Module):
    """Returns a dictionary with its loss and the norm of a layer's values."""

    def __init__(self, mix=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        self.mix = mix

    def forward(self, x, classes):
        x = torch.tanh(self.first(x))
        norm = x.square().mean()
        x = self.mix(torch.tanh(self.middle(x)))
        scores = self.last(x)
        return {
            "loss": F.cross_entropy(scores, classes) + norm,
            "scores": scores,
            "norm": norm,
        }


def run(stages, values):
    for stage in stages:
        values = stage(*values)
    return stages.results.restore(values)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_scalars_and_their_gradients_are_those_of_the_model(n_stages):
    model = Judged()
    stages = partition(model, n_stages, (ROWS, CLASSES))
    found = run(stages, (ROWS[:3], CLASSES[:3]))
    expected = model(ROWS[:3], CLASSES[:3])
    assert {name: x.shape for name, x in found.items()} == {
        "loss": (),
        "scores": (3, 3),
        "norm": (),
    }
    torch.testing.assert_close(found, expected)
    (found["loss"] + found["norm"]).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    (expected["loss"] + expected["norm"]).backward()
    torch.testing.assert_close(
        gradients, [parameter.grad for parameter in model.parameters()]
    )


def test_a_scalar_is_one_row_that_crosses_the_stages_between():
    stages = partition(Judged(), 3, (ROWS, CLASSES), ["middle", "last"])
    for boundary in stages.boundaries[1:]:
        (scalar,) = (tensor for tensor in boundary if not tensor.batched)
        assert scalar.shape == (1,)
        assert boundary[0].batched
    assert [(b.shape, b.batched) for b in stages.outputs] == [
        ((1,), False),
        ((4, 3), True),
        ((1,), False),
    ]
    # Those that compute with a scalar take one micro-batch at a time; the other passes it on.
    assert [one_by_one(stage) for stage in stages] == [True, False, True]


def centred(x):
    return x - x.mean(0)


def test_a_scalar_hides_no_mixing_in_other_stages():
    names = ["middle", "last"]
    partition(Judged(), 3, (ROWS, CLASSES), names)
    with pytest.raises(UserError, match=r"Judged mixes .*x - x.mean\(0\)"):
        partition(Judged(centred), 3, (ROWS, CLASSES), names)
    stages = partition(Judged(), 2, (ROWS, CLASSES))
    check_independent(stages, (ROWS, CLASSES))


class Ending(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(6, 6), end

    def forward(self, x):
        return self.layer(x), self.end(self, x)


@pytest.mark.parametrize(
    ("end", "shape"),
    [
        (lambda _, x: x.mean(0), r"\[6\] \(mean\)"),
        (lambda _, x: x.argmax(), r"\[\] \(argmax\)"),
        (lambda model, _: model.layer.weight.mean(0), r"\[6\] \(mean\)"),
    ],
)
def test_rejects_other_results_without_the_batch(end, shape):
    match = rf"Ending must return .*: got shape {shape} for 4 samples.*once a sample.*in the loss"
    with pytest.raises(UserError, match=match):
        partition(Ending(end), 1, ROWS)


def test_a_scalar_of_weights_alone():
    model = Ending(lambda model, _: model.layer.weight.square().sum())
    stages = partition(model, 1, ROWS)
    assert not one_by_one(stages[0])
    torch.testing.assert_close(run(stages, (ROWS,)), model(ROWS))


def test_no_stage_takes_a_scalar_alone():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return torch.tanh(self.layer(x).mean()) * self.scale

    with pytest.raises(UserError, match="no tensor with the batch crosses there"):
        partition(Last(), 3, ROWS)
