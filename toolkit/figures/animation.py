"""Schedules as an animated picture: ops light up as they run, over the activations alive.

The picture is an SVG without script. It follows the reader's light or dark theme, and stands still
where animations are unwelcome. ``python -m toolkit.figures.animation`` prints that of README.md.
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
    '<tspan class="forward">\u25a0</tspan> forward <tspan class="backward">\u25a0</tspan> backward'
)


def animation(shown: Mapping[str, Schedule], n_slots: int = 24) -> str:
    """Return an SVG of schedules side by side, all on one clock.

    Args:
        shown: schedules by title, from left to right.
        n_slots: slots from the start of the training, in a loop.
    """
    grid_width = n_slots * _SLOT
    grid_shapes = [rows(schedule.layout) for schedule in shown.values()]
    grid_height = max(n_rows for _, n_rows in grid_shapes) * _ROW
    totals = {title: _activations(schedule, n_slots) for title, schedule in shown.items()}
    scale = _CURVE / max(max(values) for values in totals.values())
    total_width, total_height = (
        _LEFT + len(shown) * (grid_width + _GAP),
        _TOP + grid_height + 16 + _CURVE + _BOTTOM,
    )
    seconds = n_slots * _SECONDS
    elements = [
        '<svg xmlns="http://www.w3.org/2000/svg"'
        f' viewBox="0 0 {total_width:g} {total_height:g}" role="img">',
        f"<title>{' beside '.join(shown)}</title><style>{_STYLE}</style>",
        f'<clipPath id="now"><rect y="-20" width="{grid_width:g}" height="400">'
        f'<animate attributeName="width" from="0" to="{grid_width:g}" dur="{seconds:g}s"'
        ' repeatCount="indefinite"/></rect></clipPath>',
        f'<text x="0" y="{_TOP + grid_height + 16 + _CURVE / 2:g}">memory</text>',
    ]
    name, n_rows = grid_shapes[0]
    elements += [
        f'<text x="0" y="{_TOP + (row + 0.7) * _ROW:g}">{name} {row}</text>'
        for row in range(n_rows)
    ]
    for column, (title, schedule) in enumerate(shown.items()):
        left_edge, baseline, values = (
            _LEFT + column * (grid_width + _GAP),
            grid_height + 16 + _CURVE,
            totals[title],
        )
        grid = _grid(schedule, n_slots)
        curve_offset, path = (
            f"translate(0 {baseline:g})",
            steps([*enumerate(values)], n_slots, _SLOT, scale),
        )
        curve = f'<path class="memory" transform="{curve_offset}" d="{path}"/>'
        peak_height = baseline - max(values) * scale
        peak_label = f"peak: {max(values):g} micro-batches"
        elements += [
            f'<g transform="translate({left_edge:g} {_TOP:g})">',
            f'<text class="title" y="-10">{title}</text>',
            f'<g class="later"><g id="schedule{column}">{grid}{curve}</g></g>',
            f'<g clip-path="url(#now)"><use href="#schedule{column}"/></g>',
            f'<text class="key" x="{grid_width:g}" y="{baseline + 16:g}">{_KEY}</text>',
            f'<path class="axis" d="M0 {baseline:g}H{grid_width:g}"/>',
            f'<path class="axis" stroke-dasharray="2 3" d="M0 {peak_height:g}H{grid_width:g}"/>',
            f'<text y="{baseline + 16:g}">{peak_label}</text></g>',
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
            kind = "forward" if cell.instruction.action == Action.FORWARD else "backward"
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
    workers = 4
    titles = f"Data parallelism, {workers} workers", f"Cyclic data parallelism, {workers} workers"
    made = catalog.data_parallel(workers), catalog.cyclic(workers)
    sys.stdout.write(animation(dict(zip(titles, made, strict=True))))
