"""The figure of schedules shows every op and all of the memory, of few ranks or of many."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection

from toolkit.errors import UserError
from toolkit.figures import schedules
from toolkit.schedule import catalog

PAPERS = [
    catalog.data_parallel(4, "per_stage_and_microbatch"),
    catalog.cyclic(4, placement="per_stage_and_microbatch"),
]


def drawn(shown, n_steps=3):
    """(grid, memory) of each column."""
    axes = schedules(shown, n_steps).axes
    return list(zip(axes[: len(axes) // 2], axes[len(axes) // 2 :], strict=True))


def boxes(grid):
    """The corners of each cell: [cells, 4, 2]."""
    (cells,) = [
        found for found in grid.collections if isinstance(found, PolyCollection)
    ]
    return np.array([path.vertices[:4] for path in cells.get_paths()])


def bars(grid):
    """Middles of the bars: (slot, row) each."""
    (lines,) = [
        found for found in grid.collections if isinstance(found, LineCollection)
    ]
    return {
        tuple(map(int, segment.mean(axis=0).round(2)))
        for segment in lines.get_segments()
    }


@pytest.mark.parametrize(
    "shown",
    [
        PAPERS,
        [*reversed(PAPERS)],
        [catalog.gpipe(4, 16), catalog.gpipe(4, 4)],
        [
            catalog.data_parallel(8),
            catalog.gradient_accumulation(2, 3),
            catalog.cyclic(3),
        ],
    ],
    ids=lambda shown: f"{shown[0].name} {len(shown)}",
)
def test_nothing_is_cut_off(shown):
    columns = drawn(shown)
    for schedule, (grid, memory) in zip(shown, columns, strict=True):
        program, corners = schedule.lower(3), boxes(grid)
        assert len(corners) == sum(
            i.action.computes for rank in program.ranks for i in rank
        )
        assert (corners >= [grid.get_xlim()[0], grid.get_ylim()[1]]).all()
        assert (corners <= [grid.get_xlim()[1], grid.get_ylim()[0]]).all()
        totals = [
            sum(slot) / schedule.n_stages
            for slot in zip(*program.activations(), strict=True)
        ]
        for curve in memory.patches:
            np.testing.assert_allclose(curve.get_data().values, totals)
        assert max(totals) < memory.get_ylim()[1]
    assert len({grid.get_ylim() for grid, _ in columns}) == 1
    assert len({memory.get_ylim() for _, memory in columns}) == 1
    slots = max(schedule.lower(3).n_slots for schedule in shown)
    assert {panel.get_xlim() for column in columns for panel in column} == {(0, slots)}


def test_two_stages_are_drawn_as_by_hand():
    ((grid, _),) = drawn([catalog.cyclic(2)], n_steps=1)
    middles = boxes(grid).mean(axis=1)
    texts = {(text.get_text(), *text.get_position()) for text in grid.texts}
    assert texts == {
        ("0", 0.5, 0), ("1", 1.5, 0), ("1", 2.5, 0), ("0", 3.5, 0),
        ("0", 2.5, 1), ("1", 3.5, 1), ("1", 4.5, 1), ("0", 5.5, 1),
    }  # fmt: skip
    assert {tuple(middle) for middle in middles.round(9)} == {
        (slot, row) for _, slot, row in texts
    }
    assert bars(grid) == {(0, 0), (3, 0)}


def test_colour_tells_the_op_and_deepens_from_step_to_step():
    ((grid, _),) = drawn([catalog.zero_bubble(2, 2)])
    fills = grid.collections[0].get_facecolor()
    assert np.unique(fills[:, 3]).tolist() == [0.4, 0.7, 1.0]
    assert len(np.unique(fills[:, :3], axis=0)) == 3


def named(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_every_colour_is_named():
    whole = ["forward", "backward", "reads stale weights"]
    assert named(schedules(catalog.cyclic(2))) == whole
    split = schedules([catalog.cyclic(2), catalog.zero_bubble(2, 2)])
    assert named(split) == [*whole[:2], "backward of weights", whole[2]]
    assert named(schedules(catalog.data_parallel(2))) == whole[:2]


@pytest.mark.parametrize(
    ("shown", "got"), [([], "none"), ("cdp_v2", "'cdp_v2'"), ([4], "4")]
)
def test_what_is_no_schedule_is_refused(shown, got):
    with pytest.raises(UserError, match=f"schedules .*got {got}$"):
        schedules(shown)


def test_stages_are_named_where_there_is_room():
    for n in (4, 8, 16):
        ((grid, _),) = drawn(catalog.cyclic(n))
        assert len(boxes(grid)) == 3 * n * 2 * n
        assert len(grid.texts) == (0 if n == 16 else len(boxes(grid)))
        assert min((text.get_fontsize() for text in grid.texts), default=4) >= 4


def test_panels_say_what_they_show():
    shown = [
        catalog.data_parallel(4, "one"),
        catalog.data_parallel(4),
        catalog.cyclic(4),
    ]
    columns = drawn(shown)
    assert [grid.get_ylabel() for grid, _ in columns] == ["micro-batch", "rank", ""]
    assert [grid.get_yticks().tolist()[-1] for grid, _ in drawn(PAPERS)] == [15, 9]
    grid, memory = columns[-1]
    assert grid.get_title() == "CDP-v2"
    assert [text.get_text() for text in memory.texts] == ["peak 2.5"]
