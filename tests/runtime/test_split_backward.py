"""Two halves of a backward leave what the whole leaves, and compute nothing twice."""

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from toolkit.model import build, gpt, partition
from toolkit.runtime.split_backward import first_half


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def twins(tensors):
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]


def roots_of(run, inputs, weights, gradients):
    """The outputs that have a gradient, and those gradients."""
    pairs = zip(run(inputs, weights), gradients, strict=True)
    return zip(*((x, g) for x, g in pairs if x.requires_grad), strict=True)


def check(run, inputs, weights, *, no_more=True):
    """Compare the two; the operations of each half, which come to ``no_more`` than the whole."""
    with torch.no_grad():
        gradients = [torch.randn_like(x) for x in run(inputs, weights)]
    of_whole, of_halves = ((twins(inputs), twins(weights)) for _ in range(2))
    roots = roots_of(run, *of_whole, gradients)
    with FlopCounterMode(display=False) as whole:
        torch.autograd.backward(*roots)
    outputs, known = roots_of(run, *of_halves, gradients)
    edges = list(map(get_gradient_edge, outputs))
    with FlopCounterMode(display=False) as first:
        found, second_half = first_half(edges, known, *of_halves)
    with FlopCounterMode(display=False) as second:
        for segment in second_half:
            segment.run()
    assert all(x.grad is None for x in of_halves[0])
    left = [w.grad for w in of_halves[1]]
    for got, leaf in zip([*found, *left], itertools.chain(*of_whole), strict=True):
        assert (got is None) == (leaf.grad is None)
        if got is not None:
            torch.testing.assert_close(got, leaf.grad, rtol=1e-10, atol=1e-12)
    pointers = [w.data_ptr() for w in left if w is not None]
    assert len(set(pointers)) == len(pointers)  # each is a memory of its own
    halves = first.get_total_flops(), second.get_total_flops()
    assert sum(halves) == whole.get_total_flops() or not no_more
    return halves


OPERATIONS = (
    torch.matmul,
    torch.add,
    lambda a, b: torch.tanh(a),
    lambda a, b: a.t(),
    lambda a, b: a.view_as(a),
    lambda a, b: torch.cat([a, b]).chunk(2)[1] * a,
    lambda a, b: b.detach() * a,
)
CASES = {
    "chain": lambda x, w: (torch.tanh(x[0] @ w[0]) @ w[1],),
    "weights on both sides": lambda x, w: (w[0] @ x[0] @ w[1],),
    "residual": lambda x, w: (x[0] + torch.relu(x[0] @ w[0]) @ w[1],),
    "weights made of weights": lambda x, w: (x[0] @ (w[0] * w[1].exp()),),
    "two weights with one gradient": lambda x, w: (x[0] @ (w[0] + w[1]),),
    "added at the end": lambda x, w: (x[0] @ w[0] + w[1],),
    "two joints of a weight": lambda x, w: (torch.tanh(x[0] @ w[0]) @ w[0] @ w[1],),
    "an output of weights only": lambda x, w: (x[0] @ w[0], w[1] * 2),
    "outputs of weights only, one of the other": lambda x, w: (
        x[0],
        (a := w[0] * 2),
        a @ w[1],
    ),
    "a weight apart and joined": lambda x, w: (x[0] @ w[0], w[0] * 2, w[1] * w[0]),
    "an input passed on": lambda x, w: (x[0].view_as(x[0]), x[0] @ w[0]),
    "an input that is an output": lambda x, w: (x[0], x[0] @ w[0] @ w[1]),
    "an input unused": lambda x, w: (x[1] @ w[0],),
    "a weight unused": lambda x, w: (x[0] @ w[1],),
    "a weight that is an output": lambda x, w: (w[0].view_as(w[0]), x[0] @ w[1]),
    "nodes of several outputs": lambda x, w: tuple((x[0] @ w[0]).chunk(2, 1)),
    "one of several outputs": lambda x, w: (
        (x[0] @ w[0]).chunk(2, 1)[1] @ w[1].chunk(2, 0)[0],
    ),
    "several inputs": lambda x, w: (torch.cat(x) @ w[0], x[0] * x[1] @ w[1]),
}


@pytest.mark.parametrize("name", CASES)
def test_halves_are_the_whole(name):
    torch.manual_seed(0)
    check(CASES[name], [leaf(4, 4), leaf(4, 4)], [leaf(4, 4), leaf(4, 4)])


@pytest.mark.parametrize(
    ("run", "detached", "products"),
    [
        # The last of three products needs no gradient of its input.
        (lambda x, w: (x[0] @ w[0] @ w[1],), False, (2, 2)),
        (lambda x, w: (x[0] @ w[0] @ w[1],), True, (0, 3)),
        # A weight with two joints gets its gradient at once.
        (CASES["two joints of a weight"], False, (5, 1)),
    ],
    ids=["chain", "no input", "two joints"],
)
def test_work_of_each_half(run, detached, products):
    inputs = [leaf(4, 4).detach() if detached else leaf(4, 4)]
    flops = check(run, inputs, [leaf(4, 4), leaf(4, 4)])
    assert flops == tuple(n * 2 * 4**3 for n in products)


def test_the_second_half_frees_what_it_has_used():
    inputs, weights = [leaf(4, 4)], [leaf(4, 4)]
    (output,) = CASES["chain"](inputs, [*weights, leaf(4, 4)])
    edge = get_gradient_edge(output)
    _, second_half = first_half([edge], [torch.ones_like(output)], inputs, weights)
    for segment in second_half:
        segment.run()
    with pytest.raises(RuntimeError, match="second time"):
        second_half[0].run()


MODELS = {
    "resnet": (
        lambda: build("resnet18", n_classes=10, image_size=32, width=4),
        lambda: torch.randn(2, 3, 32, 32, dtype=torch.float64),
    ),
    "gpt": (
        lambda: gpt(16, 8, layers=3, width=16, heads=2),
        lambda: torch.zeros(2, 8, dtype=torch.int64),
    ),
}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_halves_of_models(name, which):
    """Nothing of a stage of a model is computed twice, and each half has its share."""
    torch.manual_seed(0)
    make, example = MODELS[name]
    stages = partition(make().double(), 3, example())
    stage = stages[which]
    names = [name for name, _ in stage.named_parameters()]

    def run(x, w):
        found = torch.func.functional_call(
            stage, dict(zip(names, w, strict=True)), tuple(x)
        )
        return found if isinstance(found, tuple) else (found,)

    inputs = [leaf(2, *boundary.shape[1:]) for boundary in stages.boundaries[which]]
    first, second = check(
        run, inputs if which else [example()], twins(stage.parameters())
    )
    assert 0.3 < second / (first + second) < 0.55 if which else first == 0


@given(st.data())
def test_halves_of_any_graph(data):
    """Values are made of two earlier ones, inputs, weights and neither; some are outputs."""
    torch.manual_seed(0)
    n_inputs, n_weights = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    n_leaves = n_inputs + n_weights + 1
    index = st.integers(0, 100)
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from(OPERATIONS), index, index), min_size=1)
    )
    chosen = data.draw(
        st.lists(index, min_size=1, max_size=3, unique_by=lambda k: k % len(steps))
    )
    constant = torch.randn(3, 3, dtype=torch.float64)

    def run(x, w):
        values = [*x, *w, constant]
        for operation, first, second in steps:
            values.append(
                operation(values[first % len(values)], values[second % len(values)])
            )
        return tuple(values[n_leaves + k % len(steps)] for k in chosen)

    inputs, weights = ([leaf(3, 3) for _ in range(n)] for n in (n_inputs, n_weights))
    assume(any(x.requires_grad for x in run(inputs, weights)))
    # What leads to weights of one and of several joints alike is computed for each.
    check(run, inputs, weights, no_more=False)
