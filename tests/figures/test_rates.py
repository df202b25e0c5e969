"""The figure of tuned and certified learning rates."""

from toolkit.figures import tuned_rates

ROWS = [
    {
        "rule": f"rule {index}",
        "tuned / first": 0.8**index,
        "certified / first": 0.5**index,
    }
    for index in range(9)
]


def test_each_rule_has_a_marker_of_its_own():
    figure = tuned_rates(ROWS, {})
    (axes,) = figure.axes
    markers = [line for line in axes.lines if line.get_marker() != "None"]
    assert [line.get_xdata()[0] for line in markers] == [
        row["certified / first"] for row in ROWS
    ]
    assert [line.get_ydata()[0] for line in markers] == [
        row["tuned / first"] for row in ROWS
    ]
    looks = {(line.get_marker(), line.get_color()) for line in markers}
    assert len(looks) == len(ROWS)
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words == [row["rule"] for row in ROWS]


def test_cosines_have_a_panel_in_the_same_colours():
    cosines = {"rule 0": [(0, 1.0), (20, 0.9)], "rule 2": [(0, 1.0), (20, 0.7)]}
    rates, angles = tuned_rates(ROWS[:3], cosines).axes
    assert [*angles.lines[2].get_ydata()] == [1.0, 0.7]
    assert len(angles.lines[1].get_xdata()) == 0
    markers = [line for line in rates.lines if line.get_marker() != "None"]
    assert [line.get_color() for line in angles.lines] == [
        line.get_color() for line in markers
    ]
