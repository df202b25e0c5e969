"""Published values: reproduced from the paper's own settings, or explained."""

from dataclasses import replace

import pytest
import yaml

from experiments.papers import is_equal
from tests.thorough import more
from toolkit.cost.published import QUANTITIES, Setting, papers, published_values
from toolkit.cost.published_training import Training
from toolkit.errors import UserError
from toolkit.schedule import catalog

SLOW = ("zero_bubble",)  # as many micro-batches as there, on up to 32 ranks
LONG = more(("controllable_memory",), ())  # ten seconds
RATES = ("llama_3", "megatron_scaling")  # whose efficiency of products is assumed
FILES = [
    pytest.param(path, id=path.stem)
    for path in papers()
    if path.stem not in (*SLOW, *LONG, *RATES)
]


@pytest.mark.parametrize("path", FILES)
def test_values_are_those_of_the_paper_unless_a_note_says_why(path):
    for value in published_values(path):
        if not is_equal(value):
            assert value.note, value
            assert value.ours == pytest.approx(value.value, rel=0.2)


def trainings(name):
    """Published rates and trainings of a file."""
    (path,) = (path for path in papers() if path.stem == name)
    cases = yaml.safe_load(path.read_text())["cases"]
    return [
        (case["published"]["interleaved_1f1b"], Training.of(case["training"]))
        for case in cases
    ]


@pytest.mark.parametrize(
    ("name", "row", "billions"),
    [
        ("megatron_scaling", 0, 145.6),
        ("megatron_scaling", 1, 1008.0),
        ("llama_3", 0, 405.0),
    ],
)
def test_sizes_of_published_models_come_out(name, row, billions):
    """From layers, hidden units and the output; embeddings and norms add little."""
    _, training = trainings(name)[row]
    n_weights = (
        sum(cost.parameter_bytes for cost in training.costs()) / 2 * training.tensor
    )
    assert n_weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_operations_are_counted_as_the_paper_counts_them():
    """Megatron-LM, equation 3: F = 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    _, training = trainings("megatron_scaling")[0]
    model = training.model
    s, h, n_layers, n_words = (
        model.sequence,
        model.hidden,
        model.layers,
        model.vocabulary,
    )
    expected = 96 * training.batch * s * n_layers * h**2
    expected *= 1 + s / (6 * h) + n_words / (16 * n_layers * h)
    assert training.counted_flops() == pytest.approx(expected)


def test_more_workers_lose_what_the_paper_publishes():
    """Llama 3 with 64 and with 128 workers: the efficiency of products cancels out."""
    (few_published, few), (many_published, many) = trainings("llama_3")
    assert (few.workers, many.workers) == (64, 128)
    rates = [
        training.rate(training.schedule("interleaved_1f1b")) for training in (few, many)
    ]
    assert rates[1] / rates[0] == pytest.approx(
        many_published / few_published, rel=0.03
    )
    # Nothing but products, exchanges and the pipeline: an upper bound, by about a quarter.
    for rate, published in zip(rates, (few_published, many_published), strict=True):
        assert published < rate < 1.3 * published


def test_a_rate_follows_the_efficiency_of_products():
    _, training = trainings("megatron_scaling")[0]
    schedule = training.schedule("interleaved_1f1b")
    assert schedule.n_microbatches == 96
    slower = replace(training, cluster=replace(training.cluster, efficiency=0.4))
    rates = [each.rate(schedule) for each in (training, slower)]
    assert 0.5 < rates[1] / rates[0] < 0.65


def test_at_least_60_values_of_10_papers_can_be_compared():
    values = sum(path.read_text().count("published: {") for path in papers())
    assert values > 40
    assert len(papers()) >= 10


def test_zero_bubbles_of_one_row_of_the_paper(tmp_path):
    (path,) = (path for path in papers() if path.stem == "zero_bubble")
    lines = path.read_text().splitlines(keepends=True)
    first = next(k for k, line in enumerate(lines) if "quantity" in line)
    short = tmp_path / "short.yaml"
    short.write_text("".join(lines[: first + 3]))
    values = list(published_values(short))
    assert [value.method for value in values] == ["1F1B", "ZB-H1", "ZB-H2"]
    for value in values:
        assert round(value.ours, 4) == value.value


# p, m, stages of a rank, F, B + W, latency, and the published bubble rate.
INTERLEAVED = [
    (8, 24, 3, 18.522, 27.423, 0.601, 0.1055),
    (16, 48, 3, 11.347, 19.380, 0.377, 0.1104),
]


def interleaved_time(setting, groups_wait_once):
    """Return the time of a step of interleaved 1F1B, from the definition.

    Each rank runs its forwards and backwards in groups of p micro-batches. ``groups_wait_once``:
    between the last rank and the first, only a group's first micro-batch waits for its message.
    """
    p, m, n_chunks, forward, backward, latency, _ = setting
    orders = []
    for rank in range(p):
        forwards, backwards = [], []
        for index in range(m * n_chunks):
            group, place = divmod(index, p * n_chunks)
            chunk, microbatch = place // p, group * p + place % p
            forwards.append(("F", chunk, microbatch))
            backwards.append(("B", n_chunks - 1 - chunk, microbatch))
        n_warm_up = 2 * (p - 1 - rank) + (n_chunks - 1) * p
        order = forwards[:n_warm_up]
        for index, op in enumerate(backwards):
            order += forwards[n_warm_up + index : n_warm_up + index + 1]
            order.append(op)
        orders.append(order)

    def awaited(rank, kind, chunk, microbatch):
        step = 1 if kind == "F" else -1
        first, last, end = (0, p - 1, 0) if kind == "F" else (p - 1, 0, n_chunks - 1)
        if rank != first:
            return kind, chunk, microbatch, rank - step
        waits = chunk != end and (microbatch % p == 0 or not groups_wait_once)
        return (kind, chunk - step, microbatch, last) if waits else None

    ends = {}
    free = [0.0] * p
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                needed = awaited(rank, *order[0])
                if needed is not None and needed not in ends:
                    break
                op = order.pop(0)
                arrival = 0.0 if needed is None else ends[needed] + latency
                seconds = (forward if op[0] == "F" else backward) / n_chunks
                free[rank] = max(free[rank], arrival) + seconds
                ends[*op, rank] = free[rank]
    return max(free)


@pytest.mark.parametrize("setting", INTERLEAVED)
def test_interleaved_1f1b_is_published_without_most_waits(setting):
    p, m, n_chunks, forward, backward, latency, published = setting
    ideal = m * (forward + backward)
    assert round(1 - ideal / interleaved_time(setting, True), 4) == published
    times = {"forward": forward, "inputs": backward / 2, "weights": backward / 2}
    sizes = {"ranks": p, "microbatches": m, "stages_per_rank": n_chunks}
    same = Setting(**sizes, **times, latency=latency)
    _, bubble_rate = QUANTITIES["bubble rate"]
    ours = bubble_rate(same.schedule("interleaved_1f1b"), same)
    assert ours == pytest.approx(1 - ideal / interleaved_time(setting, False))


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_quantities_of_a_pipeline_that_one_counts_by_hand(quantity):
    """GPipe of 2 ranks and 2 micro-batches, a forward 1 and a backward 2: 9 slots, 6 of them work.

    ::

        rank 0  F F . . . . B B B B
        rank 1  . F F B B B B
    """
    setting = Setting(ranks=2, microbatches=2)
    expected = {
        "bubble rate": 1 / 3,
        "idle share": 1 / 3,
        "idle by ideal time": 1 / 2,
        "bubble time": 3,
        "step time": 9,
        "activations, fullest rank": 1,
        "activations, all ranks": 2,
        "weight versions that are read": 1,
        "devices": 2,
        "sent by a rank": 0,
    }
    _, quantity_of = QUANTITIES[quantity]
    assert quantity_of(catalog.gpipe(2, 2), setting) == pytest.approx(
        expected[quantity]
    )


@pytest.mark.parametrize(
    "text",
    [
        "title: t\nsource: s\n",
        "title: t\nsource: s\ncases: [{quantity: speed, setting: {}, published: {dp: 1.0}}]",
        "title: t\nsource: s\ncases: [{quantity: devices, setting: {}, published: {ddp: 1.0}}]",
        "title: t\nsource: s\ncases: [{quantity: devices, setting: {p: 3}, published: {dp: 1.0}}]",
    ],
)
def test_incomplete_papers_are_refused(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml is not a complete paper"):
        list(published_values(path))
