"""Stages that are given as a list of modules are called and not traced."""

import pytest
import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.structure import tensors_of
from toolkit.model.trace import evaluated, one_by_one

ROWS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Untraceable(nn.Module):
    """Reads a value, where there is one."""

    def __init__(self, layer, make=lambda x: x):
        super().__init__()
        self.layer, self.make = layer, make

    def forward(self, x, y=None, *, mask=None):
        x = self.layer(x)
        if not x.is_meta and float(x.detach().max()) > 0:
            x = x * 2
        if isinstance(y, torch.Tensor):
            x = x + y
        if isinstance(mask, torch.Tensor):
            x = x * mask
        return self.make(x)


def modules(first=lambda x: x, last=lambda x: x):
    torch.manual_seed(0)
    return [
        Untraceable(nn.Linear(6, 6), first),
        Untraceable(nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.0))),
        Untraceable(nn.Linear(6, 3), last),
    ]


def run(stages, *values):
    for stage in stages:
        values = stage(*values)
    return stages.results.restore(values)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (lambda x: x, lambda x: x),
        (lambda x: (x, x * 2), lambda x: (x, [x + 1, None])),
        (lambda x: {"x": x, "mask": x > 0, "y": None}, lambda x: {"b": x, "a": x + 1}),
    ],
)
def test_a_list_of_modules(first, last):
    given = modules(first, last)
    stages = partition(given, 3, ROWS)
    torch.testing.assert_close(run(stages, ROWS), stages.model(ROWS))
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(nn.Sequential(*given).state_dict())
    assert {p for stage in stages for p in stage.parameters()} == {*stages.model.parameters()}
    assert all(map(one_by_one, stages))  # since nothing is known of them
    assert stages.loads == (0, 0, 0)


def test_the_first_takes_what_the_example_holds():
    class Ends(nn.Module):
        def forward(self, x):
            return x

    inputs = {"y": ROWS + 1, "x": ROWS}
    stages = partition(nn.ModuleList([Untraceable(nn.Identity()), Ends()]), 2, inputs)
    assert [b.name for b in stages.boundaries[0]] == ["x", "y"]
    found = run(stages, *tensors_of(inputs))
    torch.testing.assert_close(found, stages.model(**inputs))


def test_modes_are_kept():
    given = modules()
    given[1].layer[0].eval()
    stages = partition([given[0].eval(), *given[1:]], 3, ROWS)
    assert given[0].training
    assert evaluated(stages[1]) == {"1.layer.0"}


@pytest.mark.parametrize(
    ("given", "n_stages", "match"),
    [
        (modules(), 2, "list of 3 .*expected 2"),
        ([nn.Linear(6, 6), torch.relu], 2, "Linear, builtin"),
        (
            modules(lambda x: (x, x.detach().mean(0))),
            3,
            "no stage can begin at '1': getitem_1 has no batch",
        ),
        (modules(lambda x: (x, x, x)), 3, "Untraceable cannot train"),
        (modules(last=lambda x: x.mean(0)), 3, "batch first"),
        (modules(last=lambda x: object()), 3, "object"),
    ],
)
def test_rejects(given, n_stages, match):
    with pytest.raises(UserError, match=match):
        partition(given, n_stages, ROWS)


def test_a_parameter_of_two_stages_is_refused():
    layer = nn.Linear(6, 6)
    with pytest.raises(UserError, match=r"'1': the parameter 0\.weight is used on both sides"):
        partition([layer, nn.Sequential(layer)], 2, ROWS)
