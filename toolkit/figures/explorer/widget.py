"""Schedules to play with in a notebook: controls, and what each change does to the costs."""

from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as ui

from toolkit.cost import Hardware, StageCost, Timeline
from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError, check_choice
from toolkit.figures.explorer import page
from toolkit.figures.explorer.choice import ORDERS_FILE, OWN, Choice, check_sizes, choice_of
from toolkit.figures.explorer.controls import (
    UNIFORM,
    Column,
    Costs,
    cost_sources,
    field,
    hardware_presets,
    in_columns,
    lines_of,
    show,
)
from toolkit.figures.explorer.inspection import Analysis, analyse, predict
from toolkit.figures.schedule_figure import schedules
from toolkit.figures.style import save
from toolkit.schedule import Schedule
from toolkit.schedule.instruction import collector_paused

EXPORTS = {"png": "PNG", "csv": "CSV", "trace": "Chrome trace"}
_STAGES = 16  # first end of the sliders
_MOST_STEPS = 3  # drawn: as many shades as a colour has


class Explorer(ui.VBox):
    """An interactive view of schedules, one or two side by side.

    It computes nothing of its own: schedules, programs, steady states and timelines are the
    toolkit's. Impossible choices show a sentence, and the drawing before them fades.

    Args:
        schedule: a choice of conf/schedule, or ``"your own"`` with ``orders``; or a
            :class:`~toolkit.schedule.Schedule`, which has its own sizes and options.
        stages: parts of the model.
        microbatches: of a training step.
        compare: another schedule of the same sizes, shown side by side.
        n_steps: training steps drawn, 1 to 3.
        costs: of the stages, by :func:`toolkit.cost.profile`, or a function from the number of
            stages to their costs; uniform unless given.
        hardware: what is simulated; the presets of conf/hardware can be chosen, too.
        folder: where exports are written.
        options: of the first schedule, as in :class:`Choice`: ``delay``, ``predict``,
            ``placement``, ``state``, ``n_ranks``, ``accumulate``, ``orders`` (lines or one text).

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
        costs: Costs | Sequence[StageCost] | None = None,
        hardware: Hardware | None = None,
        folder: str | Path = ".",
        **options: Any,
    ) -> None:
        if n_steps not in range(1, _MOST_STEPS + 1):
            raise UserError(f"n_steps is a whole number from 1 to {_MOST_STEPS}: got {n_steps!r}")
        first = _chosen(schedule, stages, microbatches, options)
        second = _chosen(compare or "dp", first.stages, first.microbatches, {})
        sizes = [(choice.stages, choice.microbatches) for choice in (first, second)]
        if sizes[0] != sizes[1]:
            raise UserError(
                "schedules side by side have the same stages and micro-batches: got"
                " {} x {} and {} x {}".format(*sizes[0], *sizes[1])
            )
        self._sources, self._machines = cost_sources(), hardware_presets()
        source, machine = UNIFORM, "unit"
        if costs is not None:
            source = "given"
            # The simulation refuses costs of another number of stages.
            self._sources[source] = costs if callable(costs) else lambda n_stages: costs
        if hardware is not None:
            check_hardware(hardware)
            machine = hardware.name
            self._machines[machine] = hardware
        self.columns = [Column(choice) for choice in (first, second)]
        self._panes, self._quiet = ["", ""], False
        self._good: list[tuple[Analysis, Timeline]] = []  # what is shown and possible
        later: dict[str, Any] = {"continuous_update": False}
        self.stages, self.microbatches, self.n_steps = (
            field(ui.IntSlider, name, value=value, min=1, max=max(most, value), **later)
            for name, value, most in (
                ("stages", first.stages, _STAGES),
                ("micro-batches", first.microbatches, _STAGES),
                ("steps drawn", n_steps, _MOST_STEPS),
            )
        )
        tip = "uniform: a forward and a whole backward take a slot each"
        self.costs = field(ui.Dropdown, "stage costs", tip, options=[*self._sources], value=source)
        self.hardware = field(ui.Dropdown, "hardware", options=[*self._machines], value=machine)
        look = {"width": "auto", "margin": "2px 2px 2px 100px"}
        toggle: dict[str, Any] = {"description": "compare", "icon": "columns", "layout": look}
        self.compare = ui.ToggleButton(value=compare is not None, **toggle)
        self.folder = field(ui.Text, "export to", value=str(folder), **later)
        self.view, self.status = ui.HTML(), ui.HTML()
        self.buttons = [ui.Button(description=x, icon="download") for x in EXPORTS.values()]
        for kind, button in zip(EXPORTS, self.buttons, strict=True):
            button.on_click(lambda _, kind=kind: self._export(kind))
        self.shared = (
            self.stages, self.microbatches, self.n_steps, self.costs, self.hardware, self.compare,
        )  # fmt: skip
        boxes = [column.box for column in self.columns]
        super().__init__(
            [
                in_columns(*self.shared, least="250px"),
                ui.HBox(boxes, layout={"width": "100%", "grid_gap": "20px"}),
                self.view,
                in_columns(self.folder, ui.HBox(self.buttons), least="400px"),
                self.status,
            ]
        )
        self.add_class("cdp-explorer")
        for column in self.columns:
            column.schedule.observe(lambda _, column=column: self._switch(column), "value")
        options_and_orders = [(*c.options.values(), c.orders) for c in self.columns]
        for control in (*self.shared, *options_and_orders[0], *options_and_orders[1]):
            control.observe(self._redraw, "value")
        self._redraw()

    @property
    def choices(self) -> list[Choice]:
        """What is shown, as values."""
        shown = self.columns[: 1 + self.compare.value]
        return [column.choice(self.stages.value, self.microbatches.value) for column in shown]

    def to_html(self) -> str:
        """A page of its own with what is shown: no script, no network, no kernel.

        Raises:
            UserError: the last choice is impossible.
        """
        self._check()
        return page.standalone("Schedules", self.view.value)

    def _check(self) -> None:
        if len(self._good) < len(self.choices):
            raise UserError("nothing is exported while a schedule is impossible: change it first")

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and the page for where widgets cannot be shown."""
        shown = page.standalone("Schedules", self.view.value)
        return {**super()._repr_mimebundle_(**kwargs), "text/html": shown}

    def export(self, kind: str) -> list[Path]:
        """Write what is shown, and return the paths.

        Args:
            kind: ``png``, the figure (also as SVG); ``csv``, the rank orders of each pipeline and
                the ops of any other schedule; ``trace``, simulated timelines for ui.perfetto.dev.

        Raises:
            UserError: a schedule is impossible, or an unknown kind.
        """
        check_choice("kind", kind, EXPORTS)
        self._check()
        folder = Path(self.folder.value or ".").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        names = [_file_name(analysis) for analysis, _ in self._good]
        if kind == "png":
            figure = schedules([a.schedule for a, _ in self._good], self.n_steps.value)
            return [save(figure, folder / "_and_".join(names))[0]]
        if len({*names}) < len(names):
            names = [f"{name}_{k}" for k, name in enumerate(names, 1)]
        paths = [folder / (n + {"csv": ".csv", "trace": ".trace.json"}[kind]) for n in names]
        for path, (analysis, timeline) in zip(paths, self._good, strict=True):
            if kind == "trace":
                timeline.to_chrome_trace(path)
            else:
                path.write_text(_csv(analysis.schedule))
        return paths

    def _export(self, kind: str) -> None:
        try:
            said = "written: " + ", ".join(str(path.resolve()) for path in self.export(kind))
        except (ValueError, OSError) as error:
            said = str(error)
        self.status.value = f'<span role="status">{escape(said)}</span>'

    def _switch(self, column: Column) -> None:
        """Offer another schedule's options, and redraw once afterwards."""
        self._quiet = True
        column.offer(Choice(column.schedule.value))
        self._quiet = False
        self._redraw()

    def _redraw(self, _: Any = None) -> None:
        """Analyse what is shown, and draw all that is possible on the same scales."""
        if self._quiet:
            return
        uniform = self.costs.value == UNIFORM
        real = next((name for name in self._machines if name != "unit"), "unit")
        if not uniform and self.hardware.value == "unit" != real:
            self.hardware.value = real  # a model's times mean nothing on the unit machine
            return  # the change has redrawn
        show(self.columns[1].box, self.compare.value)
        machine = self._machines[self.hardware.value]
        good: dict[int, tuple[Analysis, Timeline]] = {}
        wrong: dict[int, ValueError] = {}
        choices = self.choices
        with collector_paused():
            for k, choice in enumerate(choices):
                try:
                    analysis = analyse(choice, self.n_steps.value)
                    costs = self._sources[self.costs.value](analysis.schedule.n_stages)
                    good[k] = analysis, predict(analysis, costs, machine)
                except ValueError as error:
                    wrong[k] = error
            self._good = [*good.values()]
            drawn = page.panes(self._good, in_slots=uniform) if good else []
            for k, pane in zip(good, drawn, strict=True):
                self._panes[k] = pane
        self.view.value = page.side_by_side(
            [
                f'{page.message(wrong[k])}<div class="cdp-faded">{self._panes[k]}</div>'
                if k in wrong
                else self._panes[k] + page.lines(choice)
                for k, choice in enumerate(choices)
            ]
        )


def _chosen(
    schedule: str | Schedule, stages: int, microbatches: int, options: dict[str, Any]
) -> Choice:
    """The choice by name and options, or the one that makes a schedule."""
    if isinstance(schedule, str):
        orders = options.get("orders", ())
        orders = lines_of(orders) if isinstance(orders, str) else tuple(orders)
        choice = Choice(schedule, stages, microbatches, **{**options, "orders": orders})
        choice.build()
        return choice
    if not isinstance(schedule, Schedule):
        raise UserError(f"a schedule is a Schedule, or a name such as 'cdp_v2': got {schedule!r}")
    if options:
        raise UserError(f"a Schedule has its own options: leave out {', '.join(options)}")
    check_sizes(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    found = choice_of(schedule)
    if found is None:
        raise UserError(
            f"no controls of the explorer make {schedule!r}: it takes schedules of the catalogue,"
            " and rank orders that drain; toolkit.figures.schedules draws any"
        )
    return found


def _file_name(analysis: Analysis) -> str:
    schedule, name = analysis.schedule, analysis.choice.schedule
    if name == OWN:
        return Path(ORDERS_FILE).stem
    return f"{name}_{schedule.n_stages}x{schedule.n_microbatches}"


def _csv(schedule: Schedule) -> str:
    """Rank orders of a pipeline; of any other schedule a row an op, in the order of time."""
    import pandas as pd

    with suppress(ValueError):  # not a pipeline
        return schedule.to_csv()
    rows = [
        {
            "op": str(op),
            "kind": op.kind.name,
            "stage": op.stage,
            "microbatch": op.microbatch,
            "rank": schedule.rank(op.stage, op.microbatch),
            "slot": f"{start / schedule.timing.ticks_per_slot:g}",
            "staleness": schedule.staleness[op.stage][op.microbatch],
        }
        for op, start in sorted(schedule.timing.starts.items(), key=lambda x: (x[1], x[0]))
    ]
    return pd.DataFrame(rows).to_csv(index=False)
