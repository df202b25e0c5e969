"""Schedules as an animated picture: ops light up as they run, over the activations alive.

The picture is an SVG without script. It follows the reader's light or dark theme, and stands still
where animations are unwelcome. ``python docs/animation.py`` prints that of README.md.
"""

import sys
from collections.abc import Mapping

from toolkit.figures.explorer.page import steps
from toolkit.figures.schedule_figure import cells
from toolkit.figures.style import BLUE, ORANGE, SKY
from toolkit.schedule import Action, Schedule, catalog
from toolkit.schedule.grid import rows

_SECONDS = 0.4  # of a slot
_SLOT, _ROW = 15.0, 20.0  # pixels
_LEFT, _TOP, _GAP, _CURVE, _BOTTOM = 62.0, 26.0, 40.0, 56.0, 24.0
_STYLE = f"""
text {{ font: 12px system-ui, sans-serif; fill: #24292f; }}
.title {{ font-weight: 600; font-size: 14px; }}
.cell {{ text-anchor: middle; font-size: 10px; fill: #000; }}
.axis {{ stroke: #8c959f; fill: none; }}
.forward {{ fill: {SKY}; }} .backward {{ fill: {ORANGE}; }}
.memory {{ fill: {BLUE}; }} .key {{ text-anchor: end; }}
.later {{ opacity: 0.22; }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3; }} .memory {{ fill: {SKY}; }} }}
@media (prefers-reduced-motion: reduce) {{ .later {{ opacity: 1; }} }}
"""

_KEY = (
    '<tspan class="forward">\u25a0</tspan> forward'
    ' <tspan class="backward">\u25a0</tspan> backward'
)


def animation(schedule_of_title: Mapping[str, Schedule], n_slots: int = 24) -> str:
    """Return an SVG of schedules side by side, all on one clock.

    Args:
        schedule_of_title: schedules, from left to right.
        n_slots: slots from the start of the training, in a loop.
    """
    grid_width = n_slots * _SLOT
    grid_shapes = [rows(schedule.layout) for schedule in schedule_of_title.values()]
    grid_height = max(n_rows for _, n_rows in grid_shapes) * _ROW
    baseline = grid_height + 16 + _CURVE
    activations = [
        _activations(schedule, n_slots) for schedule in schedule_of_title.values()
    ]
    pixels_per_microbatch = _CURVE / max(map(max, activations))
    total_width = _LEFT + len(schedule_of_title) * (grid_width + _GAP)
    total_height = _TOP + baseline + _BOTTOM
    seconds = n_slots * _SECONDS
    elements = [
        '<svg xmlns="http://www.w3.org/2000/svg"'
        f' viewBox="0 0 {total_width:g} {total_height:g}" role="img">',
        f"<title>{' compared with '.join(schedule_of_title)}</title><style>{_STYLE}</style>",
        f'<clipPath id="now"><rect y="-20" width="{grid_width:g}" height="400">'
        f'<animate attributeName="width" from="0" to="{grid_width:g}" dur="{seconds:g}s"'
        ' repeatCount="indefinite"/></rect></clipPath>',
        f'<text x="0" y="{_TOP + grid_height + 16 + _CURVE / 2:g}">memory</text>',
    ]
    row_name, n_rows = grid_shapes[0]
    for row in range(n_rows):
        elements.append(
            f'<text x="0" y="{_TOP + (row + 0.7) * _ROW:g}">{row_name} {row}</text>'
        )

    for column, (title, schedule) in enumerate(schedule_of_title.items()):
        left_edge = _LEFT + column * (grid_width + _GAP)
        levels = activations[column]
        path = steps([*enumerate(levels)], n_slots, _SLOT, pixels_per_microbatch)
        curve = (
            f'<path class="memory" transform="translate(0 {baseline:g})" d="{path}"/>'
        )
        peak_height = baseline - max(levels) * pixels_per_microbatch
        # The whole picture is drawn faintly; the moving window shows it again in full.
        elements += [
            f'<g transform="translate({left_edge:g} {_TOP:g})">',
            f'<text class="title" y="-10">{title}</text>',
            f'<g class="later"><g id="schedule{column}">{_grid(schedule, n_slots)}{curve}</g></g>',
            f'<g clip-path="url(#now)"><use href="#schedule{column}"/></g>',
            f'<text class="key" x="{grid_width:g}" y="{baseline + 16:g}">{_KEY}</text>',
            f'<path class="axis" d="M0 {baseline:g}H{grid_width:g}"/>',
            f'<path class="axis" stroke-dasharray="2 3" d="M0 {peak_height:g}H{grid_width:g}"/>',
            f'<text y="{baseline + 16:g}">peak: {max(levels):g} micro-batches</text></g>',
        ]
    return "\n".join([*elements, "</svg>\n"])


def _activations(schedule: Schedule, n_slots: int) -> list[float]:
    """Return all ranks' activations in each slot, in micro-batches of the whole model."""
    live_stages = schedule.lower(_n_steps(schedule, n_slots)).total_activations()
    return [n_alive / schedule.n_stages for n_alive in live_stages[:n_slots]]


def _grid(schedule: Schedule, n_slots: int) -> str:
    """Return the cells of the first ``n_slots`` slots as SVG elements."""
    elements = []
    for cell in cells(schedule.lower(_n_steps(schedule, n_slots))):
        if cell.slot < n_slots:
            kind = (
                "forward" if cell.instruction.action == Action.FORWARD else "backward"
            )
            left_edge, top_edge = cell.slot * _SLOT, cell.row * _ROW
            elements.append(
                f'<rect class="{kind}" x="{left_edge + 0.5:g}" y="{top_edge + 1:g}"'
                f' width="{_SLOT - 1:g}" height="{_ROW - 2:g}" rx="2"/>'
                f'<text class="cell" x="{left_edge + _SLOT / 2:g}"'
                f' y="{top_edge + 0.7 * _ROW:g}">{cell.instruction.stage}</text>'
            )
    return "".join(elements)


def _n_steps(schedule: Schedule, n_slots: int) -> int:
    """Return training steps that surely last ``n_slots`` slots."""
    return n_slots * schedule.timing.ticks_per_slot // schedule.timing.period + 2


if __name__ == "__main__":
    picture = animation(
        {
            "Data parallelism, 4 workers": catalog.data_parallel(4),
            "Cyclic data parallelism, 4 workers": catalog.cyclic(4),
        }
    )
    sys.stdout.write(picture)
