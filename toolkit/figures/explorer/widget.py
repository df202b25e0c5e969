"""Schedules to play with in a notebook: controls, and what each change does to the costs."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as ui

from toolkit.cost import UNIT, Costs, Hardware, Timeline, unit_costs
from toolkit.cost.hardware import check_hardware, presets
from toolkit.errors import UserError, check_choice
from toolkit.figures.explorer.inspection import (
    AFFORDABLE,
    LARGEST,
    Analysis,
    analyse,
    check_sizes,
    costs_of,
    drawable,
    predict,
    settle,
    verdict,
)
from toolkit.figures.explorer.page import HTML, frame_of, pane, pictures_of
from toolkit.figures.schedule_figure import schedules
from toolkit.figures.style import save
from toolkit.schedule import (
    CHAINS,
    CORRECTIONS,
    FRESHEST,
    PLACEMENTS,
    STATES,
    Schedule,
    ScheduleSpec,
)
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.instruction import collector_paused
from toolkit.schedule.spec import ORDERS_FILE, RANK_ORDERS, options_of

UNIFORM = "uniform"
ANALYSED = ("resnet18", "resnet50", "vit_b_16")  # models on offer
EXPORTS = {"png": "PNG", "csv": "CSV", "trace": "Chrome trace"}
_STAGES = 16  # first end of the sliders
_MOST_STEPS = 3  # drawn: as many shades as a colour has
_EXAMPLE = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
_EACH = "each worker"  # a group: a control cannot hold None
_OPTIONS: dict[str, tuple[str, Sequence[Any]]] = {  # what it is, and the values on offer
    "delay": ("training steps by which weights are late", (0, 1, 2, 3, FRESHEST, AFFORDABLE)),
    "correction": ("what is done about late weights", CORRECTIONS),
    "placement": ("the rank of each op", PLACEMENTS),
    "state": ("whether parameters, gradients and optimizer state have one owner", STATES),
    "n_ranks": ("devices of an interleaved pipeline", range(2, 2 * LARGEST + 1)),
    "accumulate": ("micro-batches of a worker, one after another", range(1, LARGEST + 1)),
    "chains": ("order of the ranks that sum a gradient", CHAINS),
    "groups": ("of workers that start together", (_EACH, *range(1, LARGEST))),
}


class Explorer(ui.VBox):
    """An interactive view of schedules, one or two side by side.

    It computes nothing of its own: schedules, programs, steady states and timelines are the
    toolkit's. An impossible schedule shows a sentence, and the drawing before them fades.

    Args:
        schedule: a choice of conf/schedule, or ``"your own"`` with ``orders``; or a
            :class:`~toolkit.schedule.Schedule`, which has its own sizes and options.
        stages: parts of the model.
        microbatches: of a training step.
        compare: another schedule of the same sizes, shown side by side.
        n_steps: training steps drawn, 1 to 3.
        costs: of the stages, by :func:`toolkit.cost.profile`, or a function from the number of
            stages to their costs; uniform unless given. Models can be chosen, too.
        hardware: what is simulated; the presets of conf/hardware can be chosen, too.
        folder: where exports are written.
        options: of the first schedule, as in :class:`ScheduleSpec`: ``delay``, ``correction``,
            ``placement``, ``state``, ``n_ranks``, ``accumulate``, ``chains``, ``groups``,
            ``orders`` (lines or one text).

    Raises:
        UserError: an option that no control can hold, or a schedule that no controls make.
    """

    def __init__(
        self,
        schedule: str | Schedule = "cdp_v2",
        stages: int = 4,
        microbatches: int = 4,
        *,
        compare: str | Schedule | None = None,
        n_steps: int = 3,
        costs: Costs | Callable[[int], Costs] | None = None,
        hardware: Hardware | None = None,
        folder: str | Path = ".",
        **options: Any,
    ) -> None:
        if n_steps not in range(1, _MOST_STEPS + 1):
            raise UserError(f"n_steps is a whole number from 1 to {_MOST_STEPS}: got {n_steps!r}")
        first = _chosen(schedule, stages, microbatches, options)
        second = _chosen(compare or "dp", first.stages, first.microbatches, {})
        sizes = [(spec.stages, spec.microbatches) for spec in (first, second)]
        if sizes[0] != sizes[1]:
            raise UserError(
                "schedules side by side have the same stages and micro-batches: got"
                " {} x {} and {} x {}".format(*sizes[0], *sizes[1])
            )
        self._costs: dict[str, Costs | Callable[[int], Costs]] = {UNIFORM: unit_costs}
        self._costs |= {name: partial(costs_of, name) for name in ANALYSED}
        self._machines = {"unit": UNIT}
        try:
            self._machines |= presets()
        except UserError as presets_error:
            warnings.warn(f"the explorer offers no other machines: {presets_error}", stacklevel=2)
        if costs is not None:
            self._costs["given"] = costs
        if hardware is not None:
            self._machines[check_hardware(hardware).name] = hardware
        self._drawn, self._quiet = ["", ""], False  # last possible panes; while options change
        self._afforded: dict[tuple[ScheduleSpec, str, str], ScheduleSpec] = {}
        self._good: list[tuple[Analysis, Timeline]] = []  # what is shown and possible

        update_options: dict[str, Any] = {"continuous_update": False}
        self.stages, self.microbatches, self.n_steps = (
            _field(
                ui.IntSlider, name, value=value, min=1, max=max(maximum, value), **update_options
            )
            for name, value, maximum in (
                ("stages", first.stages, _STAGES),
                ("micro-batches", first.microbatches, _STAGES),
                ("steps drawn", n_steps, _MOST_STEPS),
            )
        )
        tooltip = "uniform: a forward and a whole backward take a slot each; or those of a model"
        self.costs = _field(ui.Dropdown, "stage costs", tooltip, options=[*self._costs])
        self.costs.value = UNIFORM if costs is None else "given"
        self.hardware = _field(ui.Dropdown, "hardware", options=[*self._machines])
        self.hardware.value = hardware.name if hardware else "unit"
        toggle_layout = {"width": "auto", "margin": "2px 2px 2px 100px"}
        toggle: dict[str, Any] = {
            "description": "compare",
            "icon": "columns",
            "layout": toggle_layout,
        }
        self.compare = ui.ToggleButton(value=compare is not None, **toggle)
        self.folder = _field(ui.Text, "export to", value=str(folder), **update_options)
        self.view, self.status = ui.HTML(), ui.HTML()
        self.buttons = [ui.Button(description=label, icon="download") for label in EXPORTS.values()]
        for kind, button in zip(EXPORTS, self.buttons, strict=True):
            button.on_click(lambda _, kind=kind: self._export(kind))
        self.columns = [Column(spec) for spec in (first, second)]
        self.shared = (
            self.stages, self.microbatches, self.n_steps, self.costs, self.hardware, self.compare,
        )  # fmt: skip
        columns = ui.HBox(self.columns, layout={"width": "100%", "grid_gap": "20px"})
        exports = _in_columns(self.folder, ui.HBox(self.buttons), least="400px")
        shared = _in_columns(*self.shared, least="250px")
        super().__init__([shared, columns, self.view, exports, self.status])
        self.add_class("cdp-explorer")
        for control in self.shared:
            control.observe(self._redraw, "value")
        for column in self.columns:
            column.schedule.observe(lambda _, column=column: self._switch(column), "value")
            for control in (*column.options.values(), column.orders):
                control.observe(self._redraw, "value")
        self._redraw()

    @property
    def specs(self) -> list[ScheduleSpec]:
        """The schedules that are shown, as plain values."""
        shown_columns = self.columns[: 1 + self.compare.value]
        return [column.spec(self.stages.value, self.microbatches.value) for column in shown_columns]

    def to_html(self) -> str:
        """Return a page with what is shown; it needs no network, server or kernel.

        Raises:
            UserError: the last schedule is impossible.
        """
        self._check()
        return HTML.document("Schedules", self.view.value)

    def _check(self) -> None:
        if len(self._good) < len(self.specs):
            raise UserError("nothing is exported while a schedule is impossible: change it first")

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, and a page for viewers that cannot show widgets."""
        page = HTML.document("Schedules", self.view.value)
        return {**super()._repr_mimebundle_(**kwargs), "text/html": page}

    def export(self, kind: str) -> list[Path]:
        """Write what is shown, and return the paths.

        Args:
            kind: ``png``, the figure (also as SVG); ``csv``, the rank orders of each pipeline and
                the simulated spans of any other schedule; ``trace``, simulated timelines for
                ui.perfetto.dev.

        Raises:
            UserError: a schedule is impossible, or an unknown kind.
        """
        check_choice("kind", kind, EXPORTS)
        self._check()
        folder = Path(self.folder.value or ".").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        names = [_file_name(analysis) for analysis, _ in self._good]
        if kind == "png":
            figure = schedules(
                [analysis.schedule for analysis, _ in self._good], self.n_steps.value
            )
            return [save(figure, folder / "_and_".join(names))[0]]
        if len({*names}) < len(names):
            names = [f"{name}_{number}" for number, name in enumerate(names, 1)]
        paths = [folder / (name + {"csv": ".csv", "trace": ".trace.json"}[kind]) for name in names]
        for path, (analysis, timeline) in zip(paths, self._good, strict=True):
            if kind == "trace":
                timeline.to_chrome_trace(path)
                continue
            try:
                path.write_text(analysis.schedule.to_csv())
            except UserError:  # not a pipeline
                timeline.to_frame().to_csv(path, index=False)
        return paths

    def _export(self, kind: str) -> None:
        try:
            message = "written: " + ", ".join(str(path.resolve()) for path in self.export(kind))
        except (ValueError, OSError) as error:
            message = str(error)
        self.status.value = f'<span role="status">{escape(message)}</span>'

    def _switch(self, column: "Column") -> None:
        """Offer another schedule's options, and redraw once afterwards."""
        # Each option that changes calls _redraw, which would draw half-changed specs.
        self._quiet = True
        column.offer(ScheduleSpec(column.schedule.value))
        self._quiet = False
        self._redraw()

    def _redraw(self, _: Any = None) -> None:
        """Analyse what is shown, and draw all that is possible on the same scales."""
        if self._quiet:
            return
        is_uniform = self.costs.value == UNIFORM
        real_machine = next((name for name in self._machines if name != "unit"), "unit")
        if not is_uniform and self.hardware.value == "unit" != real_machine:
            # A model's times mean nothing on the unit machine. Setting the value calls _redraw
            # again, so this call has nothing left to draw.
            self.hardware.value = real_machine
            return
        _show(self.columns[1], self.compare.value)
        specs, machine = self.specs, self._machines[self.hardware.value]
        possible: dict[int, tuple[Analysis, Timeline]] = {}
        panes = [""] * len(specs)
        if self.costs.value in ANALYSED:  # seconds, at first: no figure of other costs meanwhile
            sentence = f"analysing {self.costs.value} in {self.stages.value} stages ..."
            self.view.value = HTML.working(sentence, self.view.value)
        with collector_paused():
            for index, spec in enumerate(specs):
                try:
                    specs[index] = spec = self._settled(spec)
                    analysis = analyse(spec, self.n_steps.value)
                    costs = self._costs_of(analysis.schedule.n_stages)
                    possible[index] = analysis, predict(analysis, costs, machine)
                except ValueError as error:
                    panes[index] = HTML.impossible(error, self._drawn[index])
            self._good = [*possible.values()]
            pictures = pictures_of(self._good, by_slots=is_uniform)
            frame = frame_of(pictures)
            for (index, result), picture in zip(possible.items(), pictures, strict=True):
                self._drawn[index] = pane(*result, picture, frame)
                panes[index] = self._drawn[index] + HTML.lines(specs[index])
        sentence = verdict(*self._good, in_slots=is_uniform) if len(possible) == 2 else ""
        self.view.value = HTML.side_by_side(panes, sentence)

    def _costs_of(self, n_stages: int) -> Costs:
        costs = self._costs[self.costs.value]
        return costs(n_stages) if callable(costs) else costs

    def _settled(self, spec: ScheduleSpec) -> ScheduleSpec:
        """``spec``, with a delay that these costs and this machine afford, if it asks for one."""
        if spec.delay != AFFORDABLE:
            return spec
        cache_key = spec, self.costs.value, self.hardware.value
        if cache_key not in self._afforded:
            machine = self._machines[self.hardware.value]
            self._afforded[cache_key] = settle(spec, self._costs_of(spec.stages), machine)
        return self._afforded[cache_key]


class Column(ui.VBox):
    """Controls of one schedule: its name, its options by name, and rank orders."""

    def __init__(self, spec: ScheduleSpec) -> None:
        tooltip = "a choice of conf/schedule, or rank orders of your own"
        dropdown_options = {"options": [*METHODS, RANK_ORDERS], "value": spec.method}
        self.schedule = _field(ui.Dropdown, "schedule", tooltip, **dropdown_options)
        self.options = {
            name: _field(ui.Dropdown, name, tooltip) for name, (tooltip, _) in _OPTIONS.items()
        }
        tooltip = "each rank's ops in order: stage, kind (F, B, I or W), micro-batch"
        text_options: dict[str, Any] = {"value": "\n".join(spec.orders) or _EXAMPLE, "rows": 4}
        self.orders = _field(
            ui.Textarea, "rank orders", tooltip, continuous_update=False, **text_options
        )
        grid = _in_columns(self.schedule, *self.options.values(), least="260px")
        super().__init__([grid, self.orders], layout={"flex": "1 1 0", "min_width": "0"})
        self.add_class("cdp-column")
        self.offer(spec)

    def offer(self, spec: ScheduleSpec) -> None:
        """Offer the options that the schedule takes, with the values of ``spec``."""
        defaults = options_of(spec.method)
        for name, control in self.options.items():
            values, chosen_value = _OPTIONS[name][1], getattr(spec, name)
            value = defaults.get(name) if chosen_value is None else chosen_value
            value = values[0] if value is None else value
            control.options = [
                (str(offered), offered) for offered in dict.fromkeys((*values, value))
            ]
            control.value = value
            _show(control, name in defaults)
        _show(self.orders, spec.method == RANK_ORDERS)

    def spec(self, stages: int, microbatches: int) -> ScheduleSpec:
        """Return what the controls hold."""
        name = self.schedule.value
        control_values = {option: self.options[option].value for option in options_of(name)}
        options: dict[str, Any] = {
            option: None if value == _EACH else value for option, value in control_values.items()
        }
        if name == RANK_ORDERS:
            return ScheduleSpec(RANK_ORDERS, orders=_lines_of(self.orders.value), **options)
        return ScheduleSpec(name, stages, microbatches, **options)


def _field(kind: Callable[..., Any], name: str, tooltip: str | None = None, **options: Any) -> Any:
    """Return a labelled control as wide as its place."""
    appearance = {"layout": {"width": "auto"}, "style": {"description_width": "96px"}}
    return kind(description=name, tooltip=tooltip, **appearance, **options)


def _in_columns(*widgets: ui.Widget, least: str) -> ui.GridBox:
    """Return a grid with as many equal columns as fit, each at least ``least`` wide."""
    columns = f"repeat(auto-fit, minmax({least}, 1fr))"
    return ui.GridBox(widgets, layout={"grid_template_columns": columns, "width": "100%"})


def _show(widget: ui.DOMWidget, visible: bool) -> None:
    widget.layout.display = None if visible else "none"


def _lines_of(text: str) -> tuple[str, ...]:
    """Return the lines of ``text`` that are not blank."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _chosen(
    schedule: str | Schedule, stages: int, microbatches: int, options: dict[str, Any]
) -> ScheduleSpec:
    """Return the spec of a name and options, or of a schedule."""
    if isinstance(schedule, str):
        orders = options.get("orders", ())
        orders = _lines_of(orders) if isinstance(orders, str) else tuple(orders)
        spec = ScheduleSpec(schedule, stages, microbatches, **{**options, "orders": orders})
        drawable(replace(spec, delay=1) if spec.delay == AFFORDABLE else spec)
        return spec
    if not isinstance(schedule, Schedule):
        raise UserError(f"a schedule is a Schedule, or a name such as 'cdp_v2': got {schedule!r}")
    if options:
        raise UserError(f"a Schedule has its own options: leave out {', '.join(options)}")
    check_sizes(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    return ScheduleSpec.of(schedule)


def _file_name(analysis: Analysis) -> str:
    schedule = analysis.schedule
    name = analysis.spec.method
    size_text = f"{schedule.n_stages}x{schedule.n_microbatches}"
    return Path(ORDERS_FILE).stem if name == RANK_ORDERS else f"{name}_{size_text}"
