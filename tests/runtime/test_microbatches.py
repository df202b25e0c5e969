"""What a rank reads of the batches, and how it is cut into micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick
from toolkit.errors import UserError
from toolkit.runtime.microbatches import BatchReader, MicrobatchQueue, moved

CPU = torch.device("cpu")
ROWS = torch.zeros(6)


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
    """Batches of which a part can be loaded; it notes which were."""

    def __init__(self, batches):
        self.batches, self.asked, self.loaded = batches, [], []

    def __iter__(self):
        raise AssertionError("the whole batches are not to be loaded")

    def parts(self, n_parts, wanted):
        self.asked.append(n_parts)
        for k, batch in enumerate(self.batches):
            if parts := [*wanted(k)]:
                self.loaded += [(k, m) for m in parts]
                yield tuple(torch.cat([x.chunk(n_parts)[m] for m in parts]) for x in batch)


def feed_of(batches, wanted, n_microbatches=3, first_step=0, device=CPU):
    source = BatchReader(batches, n_microbatches, wanted, first_step, device)
    return source, MicrobatchQueue(source, first_step, wanted)


def looked(batches, wanted, first_step=0, device=CPU, n_microbatches=3):
    """A source that refuses batches that are not alike, and has looked at the first."""
    source = BatchReader(batches, n_microbatches, wanted, first_step, device)
    source.alike = True
    source.look()
    return source


def assert_microbatch(feed, step, m, batch, n_microbatches=3):
    inputs, targets = (x.chunk(n_microbatches)[m] for x in batch)
    (found,) = feed.inputs(step, m)
    assert torch.equal(found, inputs)
    assert torch.equal(feed.targets(step, m), targets)


# Sources


def test_whole_batches_are_given_as_they_are():
    """Where all of them is read, and copied where some of it."""
    batches = make_batches(2)
    source = looked(iter(batches), lambda step: [0, 1, 2])
    assert source.shape == (((2, 2), torch.float32),)
    for (inputs, targets), ((found,), labels) in zip(batches, source, strict=True):
        assert found is inputs
        assert labels is targets


def test_of_whole_batches_too_only_what_is_wanted_is_given():
    """And of each step one batch is taken, wanted or not."""
    wanted = {4: [1], 5: [], 6: [0, 2]}
    batches = make_batches(3)
    source = looked(iter(batches), wanted.__getitem__, 4)
    assert source.shape == (((2, 2), torch.float32),)
    (inputs,), targets = next(source)
    assert torch.equal(inputs, batches[0][0][2:4])
    assert targets.tolist() == [2, 3]
    assert inputs.data_ptr() == batches[0][0][2:4].data_ptr()
    assert next(source) is None
    (inputs,), targets = next(source)
    assert targets.tolist() == [200, 201, 204, 205]
    assert inputs[:, 0].tolist() == [2000, 2002, 2008, 2010]


class Sized(torch.Tensor):
    """Notes how many of its rows go to a device."""

    rows: list = []  # noqa: RUF012

    def to(self, *args, **kwargs):
        Sized.rows.append(len(self))
        return super().to(*args, **kwargs)


@pytest.mark.parametrize(("wanted", "rows"), [([], []), ([1], [2, 2]), ([0, 2], [4, 4])])
def test_only_what_is_wanted_goes_to_the_device(wanted, rows):
    batch = tuple(tensor.as_subclass(Sized) for tensor in make_batches(1)[0])
    Sized.rows = []
    looked([batch], lambda step: wanted, device=torch.device("meta"))
    assert Sized.rows == rows


def test_only_what_is_wanted_is_loaded():
    """Steps are counted from the first of the source, batches from 0."""
    wanted = {5: [0, 2], 6: [], 7: [1]}
    batches = Parts(make_batches(3))
    source = looked(batches, wanted.__getitem__, 5)
    assert source.shape == (((2, 2), torch.float32),)
    assert batches.loaded == [(0, 0), (0, 2)]
    (inputs,), targets = next(source)
    assert targets.tolist() == [0, 1, 4, 5]
    assert inputs[:, 0].tolist() == [0, 2, 8, 10]
    assert next(source) is None
    (inputs,), targets = next(source)
    assert targets.tolist() == [202, 203]
    assert batches.loaded == [(0, 0), (0, 2), (2, 1)]
    assert batches.asked == [3]


def test_a_rank_that_reads_nothing():
    batches = Parts(make_batches(3))
    source = looked(batches, lambda step: [])
    assert source.shape is None
    assert batches.loaded == []


def test_a_rank_that_reads_nothing_at_first():
    batches = Parts(make_batches(2))
    source = looked(batches, lambda step: [2] if step else [])
    assert source.shape is None
    assert next(source) is None
    assert next(source)[1].tolist() == [104, 105]
    assert source.shape == (((2, 2), torch.float32),)


def test_several_inputs_and_their_types():
    inputs = torch.zeros(6, 4), torch.zeros(6, 3, 2, dtype=torch.int64)
    source = looked([(inputs, torch.zeros(6))], lambda step: [1], n_microbatches=2)
    assert source.shape == (((3, 4), torch.float32), ((3, 3, 2), torch.int64))
    assert [x.shape for x in next(source)[0]] == [(3, 4), (3, 3, 2)]


def test_there_is_no_first_batch():
    with pytest.raises(UserError, match="0"):
        looked([], lambda step: [0])


@pytest.mark.parametrize("divisible", [False, True])
def test_batches_are_moved_to_the_device(divisible):
    """Every step's, the first one's too."""
    meta = torch.device("meta")
    batches = Parts(make_batches(2)) if divisible else make_batches(2)
    source = looked(batches, lambda step: [0], device=meta)
    for _ in range(2):
        (inputs,), targets = next(source)
        assert inputs.device == targets.device == meta


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
def test_batches_that_are_not_alike_are_refused(other, seen, divisible):
    batches = [*make_batches(2), *other]
    source = looked(Parts(batches) if divisible else batches, lambda step: [1], 7)
    next(source)
    next(source)
    with pytest.raises(UserError, match=rf"step 9.*{seen}.*\[2, 2\] of torch.float32"):
        next(source)
    assert len([*BatchReader(batches, 3, lambda step: [1], 7, CPU)]) == 3  # unless they need not be


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(7, 2), torch.zeros(7)),
        (torch.zeros(6, 2), torch.zeros(3)),
        (torch.zeros(0, 2), torch.zeros(0)),
        ((torch.zeros(6), torch.zeros(9)), torch.zeros(6)),
    ],
    ids=["not a multiple", "targets differ", "empty", "inputs differ"],
)
def test_what_cannot_be_divided_is_refused(batch):
    with pytest.raises(UserError, match="3"):
        looked([batch], lambda step: [])
    source = looked([*make_batches(1), batch], lambda step: [0])
    next(source)
    with pytest.raises(UserError, match="3"):
        next(source)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ROWS, "Tensor"),
        ((ROWS, ROWS, ROWS), "tuple of 3"),
        (3, "int"),
        (({"x": ROWS}, ROWS), "dict"),
        (([1], ROWS), "int"),
        ((ROWS, [1]), "list"),
        ((ROWS, torch.tensor(1)), "tensor"),
    ],
    ids=["one tensor", "three", "a number", "by name", "no tensors", "no target", "no dimension"],
)
def test_what_is_no_batch_is_refused(batch, expected):
    with pytest.raises(UserError, match=expected):
        looked([batch], lambda step: [])


# Feeds


def test_micro_batches_are_slices():
    batches = make_batches(2)
    _, feed = feed_of(batches, lambda step: range(3))
    for step, batch in enumerate(batches):
        for m in range(3):
            assert_microbatch(feed, step, m, batch)


def test_steps_may_overlap():
    """A later step's is asked for while an earlier one's is still wanted."""
    whole = make_batches(3)
    batches = Parts(whole)
    for some in (whole, batches):
        _, feed = feed_of(some, lambda step: [0, 2])
        for step, m in ((2, 0), (0, 2), (1, 0), (0, 0), (2, 2)):
            assert_microbatch(feed, step, m, whole[step])
        with pytest.raises(KeyError):
            feed.inputs(0, 1)
    assert batches.loaded == [(k, m) for k in range(3) for m in (0, 2)]


def test_results_are_in_order_of_micro_batches():
    _, feed = feed_of(make_batches(1), lambda step: [0])
    assert feed.n_finished(0) == 0
    for m in (2, 0):
        feed.finished(0, m, torch.tensor(float(m)), torch.full((2, 1), m))
    assert feed.n_finished(0) == 2
    result = feed.result(0)
    assert (result.step, result.microbatches) == (0, (0, 2))
    assert result.losses.tolist() == [0, 2]
    assert result.outputs.tolist() == [[0], [0], [2], [2]]
    assert float(result.loss) == 1
    assert feed.n_finished(0) == 0


def test_a_result_of_no_micro_batch():
    _, feed = feed_of(Parts(make_batches(1)), lambda step: [])
    result = feed.result(0)
    assert result.microbatches == ()
    assert result.losses.shape == result.outputs.shape == (0,)


def test_a_result_drops_the_batch():
    _, feed = feed_of(make_batches(2), lambda step: [0])
    feed.inputs(0, 0)
    feed.result(0)
    with pytest.raises(KeyError):
        feed.inputs(0, 0)


def test_what_is_left_is_taken():
    """So that a run ends at the same batch on every rank; what it does not read is not loaded."""
    iterator = iter(make_batches(5))
    _, feed = feed_of(iterator, lambda step: [0], first_step=2)
    feed.skip_to(5)
    assert len([*iterator]) == 2
    batches = Parts(make_batches(5))
    _, feed = feed_of(batches, lambda step: [1] if step % 2 else [], first_step=2)
    feed.skip_to(6)
    assert batches.loaded == [(1, 1), (3, 1)]
    feed.skip_to(3)  # which is past
    assert batches.loaded == [(1, 1), (3, 1)]


@given(st.data())
@quick
def test_any_rank_gets_its_slices(data):
    """Whatever it reads of each step, and in whichever order it asks."""
    n_parts, n_steps = data.draw(st.sampled_from([1, 2, 3, 6])), data.draw(st.integers(1, 4))
    first = data.draw(st.integers(0, 3))
    parts = st.sets(st.integers(0, n_parts - 1)).map(sorted)
    wanted = {first + k: data.draw(parts) for k in range(n_steps)}
    batches = Parts(make_batches(n_steps))
    _, feed = feed_of(batches, wanted.__getitem__, n_parts, first)
    for step, m in data.draw(st.permutations([(t, m) for t in wanted for m in wanted[t]])):
        assert_microbatch(feed, step, m, batches.batches[step - first], n_parts)
    feed.skip_to(first + n_steps)
    assert batches.loaded == [(step - first, m) for step in wanted for m in wanted[step]]


class Moving:
    """A tensor that tells how it was asked to move."""

    def to(self, device, non_blocking):
        return device, non_blocking


@pytest.mark.parametrize(("name", "ahead"), [("cpu", False), ("cuda", True), (None, False)])
def test_only_a_gpu_copies_while_the_cpu_goes_on(name, ahead):
    device = None if name is None else torch.device(name)
    asked = (device, ahead)
    assert moved((Moving(), Moving()), Moving(), device) == ((asked, asked), asked)
