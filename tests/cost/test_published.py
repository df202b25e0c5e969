"""Published values: reproduced from the paper's own settings, or explained."""

import pytest

from experiments.papers import is_equal
from toolkit.cost.published import QUANTITIES, Setting, papers, published_values
from toolkit.errors import UserError
from toolkit.schedule import catalog

SLOW = ("zero_bubble",)  # as many micro-batches as there, on up to 32 ranks
FILES = [pytest.param(path, id=path.stem) for path in papers() if path.stem not in SLOW]


@pytest.mark.parametrize("path", FILES)
def test_values_are_those_of_the_paper_unless_a_note_says_why(path):
    for value in published_values(path):
        if not is_equal(value):
            assert value.note, value
            assert value.ours == pytest.approx(value.value, rel=0.2)


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
    assert quantity_of(catalog.gpipe(2, 2), setting) == pytest.approx(expected[quantity])


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
