"""What a rank reads of the batches, and how it is cut into micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick
from toolkit.errors import UserError
from toolkit.runtime.losses import LossValue
from toolkit.runtime.microbatches import BatchReader, MicrobatchQueue, _selected

CPU = torch.device("cpu")
ROWS = torch.zeros(6)
SHAPE = (((2, 2), torch.float32),)


def make_batches(n, size=6, width=2, dtype=torch.float32):
    """Batches in which every number is another."""
    return [
        (
            torch.arange(size * width, dtype=dtype).view(size, width) + 1000 * k,
            torch.arange(size) + 100 * k,
        )
        for k in range(n)
    ]


class Parts:
    """Divisible batches that note which parts were loaded."""

    def __init__(self, batches):
        self.batches, self.loaded = batches, []

    def __iter__(self):
        raise AssertionError("the whole batches are not to be loaded")

    def parts(self, n_parts, wanted):
        for k, batch in enumerate(self.batches):
            if parts := [*wanted(k)]:
                self.loaded += [(k, m) for m in parts]
                yield tuple(
                    torch.cat([x.chunk(n_parts)[m] for m in parts]) for x in batch
                )


def queue_of(batches, wanted, n_microbatches=3, first_step=0):
    source = BatchReader(batches, n_microbatches, wanted, first_step, CPU)
    return MicrobatchQueue(source, first_step, wanted)


def reader(batches, wanted, first_step=0, device=CPU, n_microbatches=3, n_steps=None):
    """A reader that refuses batches that are not alike, and has looked at the first."""
    source = BatchReader(batches, n_microbatches, wanted, first_step, device, n_steps)
    source.same_sized = True
    source.look()
    return source


# Readers


def test_whole_batches_are_not_copied():
    batches = make_batches(2)
    source = reader(iter(batches), lambda step: [0, 1, 2])
    assert source.shape == SHAPE
    for (inputs, targets), ((found,), labels) in zip(batches, source, strict=True):
        assert found is inputs
        assert labels is targets


class Sized(torch.Tensor):
    """Notes how many of its rows go to a device."""

    rows: list = []  # noqa: RUF012

    def to(self, *args, **kwargs):
        Sized.rows.append(len(self))
        return super().to(*args, **kwargs)


@pytest.mark.parametrize(
    ("wanted", "rows"), [([], []), ([1], [2, 2]), ([0, 2], [4, 4])]
)
def test_only_what_is_wanted_moves_to_the_device(wanted, rows):
    batches = [
        tuple(tensor.as_subclass(Sized) for tensor in b) for b in make_batches(2)
    ]
    meta = torch.device("meta")
    Sized.rows = []
    source = reader(batches, lambda step: wanted, device=meta)
    assert Sized.rows == rows
    for share in source:
        assert share is None or share[0][0].device == share[1].device == meta
    assert Sized.rows == 2 * rows


def test_several_inputs_and_a_rank_that_reads_nothing_at_first():
    inputs = torch.zeros(6, 4), torch.zeros(6, 3, 2, dtype=torch.int64)
    batches = Parts([(inputs[0], torch.zeros(6))] * 2)
    source = reader(batches, lambda step: [2] if step == 1 else [])
    assert (source.shape, next(source), batches.loaded) == (None, None, [])
    assert next(source)[1].tolist() == [0, 0]
    assert source.shape == (((2, 4), torch.float32),)
    source = reader([(inputs, torch.zeros(6))], lambda step: [1], n_microbatches=2)
    assert source.shape == (((3, 4), torch.float32), ((3, 3, 2), torch.int64))
    assert [x.shape for x in next(source)[0]] == [(3, 4), (3, 3, 2)]
    named = {"z": inputs[0], "a": {"b": inputs[1], "flag": True}}
    source = reader([(named, torch.zeros(6))], lambda step: [1], n_microbatches=2)
    assert [x.shape for x in next(source)[0]] == [(3, 3, 2), (3, 4)]  # by sorted keys


@pytest.mark.parametrize(
    ("other", "seen"),
    [
        (make_batches(1, size=3), r"\[1, 2\] of torch.float32"),
        (make_batches(1, width=5), r"\[2, 5\] of torch.float32"),
        (make_batches(1, dtype=torch.float64), r"\[2, 2\] of torch.float64"),
    ],
    ids=["size", "width", "dtype"],
)
@pytest.mark.parametrize("divisible", [False, True])
def test_batches_that_differ_are_refused(other, seen, divisible):
    """Where they must be alike."""
    batches = [*make_batches(2), *other]
    source = reader(Parts(batches) if divisible else batches, lambda step: [1], 7)
    next(source)
    next(source)
    with pytest.raises(UserError, match=rf"step 9.*{seen}.*\[2, 2\] of torch.float32"):
        next(source)
    assert len([*BatchReader(batches, 3, lambda step: [1], 7, CPU)]) == 3


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(7, 2), torch.zeros(7)), r"\[7, 7\].*multiple of 3"),
        ((torch.zeros(6, 2), torch.zeros(3)), r"\[6, 3\].*multiple of 3"),
        ((torch.zeros(0, 2), torch.zeros(0)), r"\[0, 0\].*multiple of 3"),
        (
            ((torch.zeros(6), torch.zeros(9)), torch.zeros(6)),
            r"\[6, 9, 6\].*multiple of 3",
        ),
        (ROWS, "tensor.*pair"),
        ((ROWS, ROWS, ROWS), "tuple of 3.*pair"),
        (3, "int.*pair"),
        (({"x": ROWS, "y": {1}}, ROWS), "set for y.*tensors"),
        (({"x": ROWS, "y": ROWS[1:]}, ROWS), "sizes.*one size"),
        (([1], ROWS), "list of 1.*tensors"),
        ((ROWS, [1]), "list.*tensors"),
        ((ROWS, torch.tensor(1)), r"shape \[\].*tensors"),
    ],
)
def test_wrong_batches_are_refused(batch, expected):
    """The first, and later ones."""
    with pytest.raises(UserError, match=expected):
        reader([batch], lambda step: [])
    source = reader([*make_batches(1), batch], lambda step: [0])
    next(source)
    with pytest.raises(UserError, match=expected):
        next(source)


@pytest.mark.parametrize("n_batches", [0, 2])
def test_more_steps_than_batches_are_refused(n_batches):
    with pytest.raises(UserError, match=f"n_steps: got 3.*n_steps={n_batches}"):
        list(reader(make_batches(n_batches), lambda step: [0], n_steps=3))
    batches = iter(make_batches(3))  # none is taken beyond n_steps
    assert (
        len(list(BatchReader(batches, 3, lambda step: [0], 0, CPU, 2))),
        len([*batches]),
    ) == (
        2,
        1,
    )


# Queues


def test_results_are_in_order_of_micro_batches():
    """And the batch is dropped with them."""
    queue = queue_of(make_batches(2), lambda step: [0])
    queue.microbatch(1, 0)
    for m in (2, 0):
        queue.finished(0, m, LossValue(torch.tensor(float(m))), torch.full((2, 1), m))
    assert (queue.n_finished(0), queue.n_finished(1)) == (2, 0)
    result, nothing = queue.result(0), queue.result(1)
    assert (result.step, result.microbatches, nothing.microbatches) == (0, (0, 2), ())
    assert (result.losses.tolist(), result.outputs.flatten().tolist()) == (
        [0, 2],
        [0, 0, 2, 2],
    )
    assert float(result.loss) == 1
    assert nothing.losses.shape == nothing.outputs.shape == (0,)
    assert queue.n_finished(0) == 0
    for step in (0, 1):
        with pytest.raises(KeyError):
            queue.microbatch(step, 0)


def test_a_queue_takes_batches_that_it_does_not_use():
    """So a run ends at the same batch on every rank."""
    iterator = iter(make_batches(5))
    queue = queue_of(iterator, lambda step: [0], first_step=2)
    queue.skip_to(5)
    queue.skip_to(3)  # already passed
    assert len([*iterator]) == 2


@given(st.data())
@quick
def test_any_rank_gets_its_slices(data):
    """Whatever it reads of each step, and in any order, as steps overlap; it loads no others."""
    n_parts, n_steps = (
        data.draw(st.sampled_from([1, 2, 3, 6])),
        data.draw(st.integers(1, 4)),
    )
    first = data.draw(st.integers(0, 3))
    parts = st.sets(st.integers(0, n_parts - 1)).map(sorted)
    wanted = {first + k: data.draw(parts) for k in range(n_steps)}
    whole = make_batches(n_steps)
    order = data.draw(st.permutations([(t, m) for t in wanted for m in wanted[t]]))
    for batches in (whole, Parts(whole)):
        queue = queue_of(batches, wanted.__getitem__, n_parts, first)
        for step, m in order:
            inputs, targets = (x.chunk(n_parts)[m] for x in whole[step - first])
            (found,), labels = queue.microbatch(step, m)
            assert torch.equal(found, inputs)
            assert torch.equal(labels, targets)
        queue.skip_to(first + n_steps)
    assert batches.loaded == [
        (step - first, m) for step in wanted for m in wanted[step]
    ]


class Moving:
    """A tensor that notes how it was asked to move."""

    def to(self, device, non_blocking):
        return device, non_blocking


@pytest.mark.parametrize(
    ("name", "ahead"), [("cpu", False), ("cuda", True), (None, False)]
)
def test_only_a_gpu_copies_asynchronously(name, ahead):
    device = None if name is None else torch.device(name)
    assert _selected(Moving(), 1, [0], device) == (device, ahead)
