"""Stages that are given as a list of modules are called and not traced."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.structure import arguments, tensors_of
from toolkit.model.traced_stage import evaluated, one_by_one
from toolkit.runtime import SingleProcess
from toolkit.schedule import catalog

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
    assert {p for stage in stages for p in stage.parameters()} == {
        *stages.model.parameters()
    }
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


class SumThenLinear(nn.Module):
    """Sums its arguments, or the values of a dictionary."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, *inputs, **more):
        total = 0
        for value in (*inputs, *more.values()):
            total = total + (sum(value.values()) if isinstance(value, dict) else value)
        return self.layer(total)


@pytest.mark.parametrize("example", [(ROWS,), {"input": ROWS}, ROWS])
def test_stages_train_in_a_single_process(example):
    torch.manual_seed(0)
    pair = [nn.Linear(6, 6), nn.Linear(6, 3)]
    expected = nn.Sequential(*copy.deepcopy(pair))
    stages = partition(pair, 2, example)
    sgd = partial(torch.optim.SGD, lr=0.1)
    runtime = SingleProcess(stages, catalog.gpipe(2, 2), sgd, F.cross_entropy)
    labels = torch.tensor([0, 1, 2, 0])
    runtime.step(example, labels)
    optimizer = sgd(expected.parameters())
    F.cross_entropy(expected(ROWS), labels).backward()
    optimizer.step()
    torch.testing.assert_close(stages.model.state_dict(), expected.state_dict())


@pytest.mark.parametrize(
    ("example", "names"),
    [
        ((ROWS, ROWS + 1), ["input_0", "input_1"]),
        (({1: ROWS, "b c": ROWS + 1},), ["input_0_1", "input_0_b_c"]),
        ({"a": {"x-y": ROWS}, "b": ROWS + 1}, ["a_x_y", "b"]),
        ({"a": {"0": ROWS}, "a_0": ROWS + 1}, ["a_0", "a_0_1"]),
    ],
)
def test_inputs_of_any_key_have_names(example, names):
    stages = partition([SumThenLinear(), nn.Linear(6, 3)], 2, example)
    assert [boundary.name for boundary in stages.boundaries[0]] == names
    args, kwargs = arguments(example)
    torch.testing.assert_close(
        run(stages, *tensors_of(example)), stages.model(*args, **kwargs)
    )


@pytest.mark.parametrize("key", ["b c", "class", "0"])
def test_a_keyword_that_is_no_name_is_refused(key):
    with pytest.raises(UserError, match=f"module 0 .SumThenLinear.*'{key}'"):
        partition([SumThenLinear(), nn.Linear(6, 3)], 2, {key: ROWS})
    pair = [SumThenLinear(), Untraceable(nn.Identity(), lambda x: {key: x})]
    with pytest.raises(UserError, match=f"module 2 .SumThenLinear.*'{key}'"):
        partition([*pair, SumThenLinear()], 3, ROWS)


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
    with pytest.raises(
        UserError, match=r"'1': the parameter 0\.weight is used on both sides"
    ):
        partition([layer, nn.Sequential(layer)], 2, ROWS)
