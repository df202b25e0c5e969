"""Controls of the explorer: those of one schedule, and how all of them look."""

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as ui

from toolkit.figures.explorer.inspection import AFFORDABLE, FASTEST, MAX_DRAWN
from toolkit.schedule import (
    CHAINS,
    CORRECTIONS,
    FRESHEST,
    PLACEMENTS,
    STATES,
    ScheduleSpec,
)
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.plain_options import RANK_ORDERS, options_of

_EXAMPLE = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
_EACH = "each worker"  # a group: a control cannot hold None
_NOT_GIVEN = (_EACH, FASTEST)  # None in a spec
# What it is, and the values on offer.
_OPTIONS: dict[str, tuple[str, Sequence[Any]]] = {
    "delay": (
        "training steps by which weights are late",
        (0, 1, 2, 3, FRESHEST, AFFORDABLE),
    ),
    "correction": ("what is done about late weights", CORRECTIONS),
    "placement": ("the rank of each op", PLACEMENTS),
    "state": (
        "whether parameters, gradients and optimizer state have one owner",
        STATES,
    ),
    "n_ranks": ("devices of an interleaved pipeline", range(2, 2 * MAX_DRAWN + 1)),
    "accumulate": (
        "micro-batches of a worker, one after another",
        range(1, MAX_DRAWN + 1),
    ),
    "chains": ("order of the ranks that sum a gradient", (FASTEST, *CHAINS)),
    "groups": ("of workers that start together", (_EACH, *range(1, MAX_DRAWN))),
}


class Column(ui.VBox):
    """Controls of one schedule: its name, its options by name, and rank orders."""

    def __init__(self, spec: ScheduleSpec) -> None:
        tooltip = "a choice of conf/schedule, or rank orders of your own"
        names = [(method.label, name) for name, method in METHODS.items()]
        # Pairs of what the control shows and what it holds.
        names.append((RANK_ORDERS, RANK_ORDERS))
        self.schedule = field(
            ui.Dropdown, "schedule", tooltip, options=names, value=spec.method
        )
        self.options = {}
        for name, (tooltip, _) in _OPTIONS.items():
            self.options[name] = field(ui.Dropdown, name, tooltip)
        self.orders = field(
            ui.Textarea,
            "rank orders",
            "each rank's ops in order: stage, kind (F, B, I or W), micro-batch",
            continuous_update=False,
            value="\n".join(spec.orders) or _EXAMPLE,
            rows=4,
        )
        grid = in_columns(self.schedule, *self.options.values(), min_width="260px")
        super().__init__(
            [grid, self.orders], layout={"flex": "1 1 0", "min_width": "0"}
        )
        self.add_class("cdp-column")
        self.offer(spec)

    def offer(self, spec: ScheduleSpec) -> None:
        """Offer the options that the schedule takes, with the values of ``spec``."""
        defaults = options_of(spec.method)
        for name, control in self.options.items():
            _, offered_values = _OPTIONS[name]
            value = getattr(spec, name)
            # None in a spec is the method's default; where a control offers a word for it, that
            # word.
            if value is None and offered_values[0] not in _NOT_GIVEN:
                value = defaults.get(name)
            if value is None:
                value = offered_values[0]
            # The spec's value may be none of those on offer, such as 5 steps of delay.
            distinct_values = dict.fromkeys((*offered_values, value))
            control.options = [(str(offered), offered) for offered in distinct_values]
            # Only now: ipywidgets takes the first option when the options change.
            control.value = value
            show(control, name in defaults)
        show(self.orders, spec.method == RANK_ORDERS)

    @property
    def free_chains(self) -> bool:
        """Whether the chains are the fastest ones."""
        return self.options["chains"].value == FASTEST

    def spec(self, stages: int, microbatches: int) -> ScheduleSpec:
        """Return what the controls hold."""
        method = self.schedule.value
        options: dict[str, Any] = {}
        for name in options_of(method):
            value = self.options[name].value
            options[name] = None if value in _NOT_GIVEN else value
        if method == RANK_ORDERS:
            return ScheduleSpec(
                RANK_ORDERS, orders=lines_of(self.orders.value), **options
            )
        return ScheduleSpec(method, stages, microbatches, **options)


def slider(name: str, value: int, maximum: int) -> Any:
    """Return a labelled slider from 1 on."""
    return field(
        ui.IntSlider,
        name,
        value=value,
        min=1,
        max=max(maximum, value),
        continuous_update=False,
    )


def field(
    kind: Callable[..., Any], name: str, tooltip: str | None = None, **options: Any
) -> Any:
    """Return a labelled control as wide as its place."""
    appearance = {"layout": {"width": "auto"}, "style": {"description_width": "96px"}}
    return kind(description=name, tooltip=tooltip, **appearance, **options)


def in_columns(*widgets: ui.Widget, min_width: str) -> ui.GridBox:
    """Return a grid with as many equal columns as fit, each at least ``min_width`` wide."""
    columns = f"repeat(auto-fit, minmax({min_width}, 1fr))"
    return ui.GridBox(
        widgets, layout={"grid_template_columns": columns, "width": "100%"}
    )


def show(widget: ui.DOMWidget, visible: bool) -> None:
    """Show or hide a control."""
    widget.layout.display = None if visible else "none"


def lines_of(text: str) -> tuple[str, ...]:
    """Return the lines of ``text`` that are not blank."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())
