"""The script for students computes what the toolkit computes, and stays short and independent."""

import ast
import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from toolkit.model import partition
from toolkit.runtime import SingleProcess
from toolkit.schedule import catalog

SCRIPT = Path(__file__).parents[2] / "docs/from_scratch.py"
SOURCE = SCRIPT.read_text()
SIZES = range(2, 9)
DP, CDP = 0, 2  # staggers


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("from_scratch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_lists(staleness):
    return [list(row) for row in staleness]


@pytest.mark.parametrize("n", SIZES)
def test_delays(script, n):
    assert script.freshest_delays(n, DP) == as_lists(catalog.data_parallel(n).staleness)
    assert script.uniform_delays(n, CDP) == as_lists(catalog.cyclic(n, 1).staleness)
    assert script.freshest_delays(n, CDP) == as_lists(catalog.cyclic(n).staleness)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("stagger", [DP, CDP])
def test_memory_curve(script, n, stagger):
    """The curve is that of the program, slot by slot; the paper's peaks follow."""
    schedule = catalog.cyclic(n) if stagger == CDP else catalog.data_parallel(n)
    program = schedule.lower(n_steps=3)
    curve = script.memory_curve(n, stagger, n_steps=3)
    assert curve == [stored / n for stored in program.total_activations()]
    assert max(curve) == ((n + 1) / 2 if stagger == CDP else n)
    if stagger == CDP:
        assert set(curve[2 * n - 2 : 6 * n]) == {(n + 1) / 2}


@pytest.mark.parametrize(
    ("schedule", "delays"),
    [
        (catalog.data_parallel(4), lambda script: script.freshest_delays(4, DP)),
        (catalog.cyclic(4, 1), lambda script: script.uniform_delays(4, CDP)),
        (catalog.cyclic(4), lambda script: script.freshest_delays(4, CDP)),
    ],
    ids=["dp", "cdp_v1", "cdp_v2"],
)
def test_trajectory(script, schedule, delays):
    """Weights after every step, parameter by parameter."""
    torch.manual_seed(0)
    model = script.make_model(4).double()
    example = torch.zeros(2, 64, dtype=torch.float64)
    runtime = SingleProcess(
        partition(copy.deepcopy(model), 4, example, by=["1", "2", "3"]),
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        loss=F.cross_entropy,
    )
    first = {name: parameter.detach() for name, parameter in model.named_parameters()}
    versions = [first, first]
    momenta = {name: torch.zeros_like(weight) for name, weight in first.items()}
    for _ in range(6):
        inputs = torch.randn(8, 64, dtype=torch.float64)
        targets = torch.randint(10, (8,))
        runtime.step(inputs, targets)
        versions, momenta = script.train_step(
            model, versions, momenta, delays(script), inputs, targets, lr=0.1
        )
        expected = dict(runtime.module().named_parameters())
        assert versions[0].keys() == expected.keys()
        for name, weight in versions[0].items():
            torch.testing.assert_close(
                weight, expected[name].data, rtol=1e-10, atol=1e-10
            )


def test_prints_the_picture_of_its_comment_and_accuracies(script, capsys):
    script.main(n_epochs=1)
    printed = capsys.readouterr().out
    cdp = printed.partition("CDP, two training steps")[2].splitlines()
    n_slots = 14
    for line in cdp[1:5]:
        picture = line[: len("micro-batch 0 ") + 3 * n_slots]
        assert f"#   {picture.rstrip()}" in SOURCE
    for rule in ("DP ", "CDP-v1 ", "CDP-v2 "):
        assert any(line.startswith(rule) for line in printed.splitlines())


def test_is_short_and_imports_nothing_of_the_toolkit():
    assert len(SOURCE.splitlines()) <= 150
    packages = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            packages.update(alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            packages.add(node.module.partition(".")[0])
    assert packages == {"torch", "sklearn"}
