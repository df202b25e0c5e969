"""Schedules to play with in a notebook: what each change of a control does to the costs."""

from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as ui

from toolkit.cost import Costs, Hardware, Timeline, unit_costs
from toolkit.cost.worker_forms import CostsOf
from toolkit.errors import UserError, check_choice
from toolkit.figures.explorer.arguments import (
    check_same_sizes,
    chosen_spec,
    machines_on_offer,
    of_any_cut,
)
from toolkit.figures.explorer.controls import (
    Column,
    field,
    in_columns,
    show,
    slider,
)
from toolkit.figures.explorer.device_costs import (
    BATCH,
    check_width,
    hardware_of_ranks,
    model_costs,
)
from toolkit.figures.explorer.inspection import (
    FASTEST,
    Analysis,
    analyse,
    ddp_seconds,
    predict,
    settled,
    verdict,
)
from toolkit.figures.explorer.page import HTML, frame_of, pane, pictures_of
from toolkit.figures.schedule_figure import schedules
from toolkit.figures.style import save
from toolkit.model.partition import MEASURES
from toolkit.schedule import Schedule, ScheduleSpec
from toolkit.schedule.instruction import collector_paused
from toolkit.schedule.plain_options import ORDERS_FILE, RANK_ORDERS, options_of

UNIFORM = "uniform"
ANALYSED = ("resnet18", "resnet50", "vit_b_16")  # models on offer
EXPORTS = {"png": "PNG", "csv": "CSV", "trace": "Chrome trace"}
_STAGES = 16  # first end of the sliders
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # images of a micro-batch
_WIDTHS = (1, 2, 4, 8)  # devices of a rank
_GIVEN = "given"  # costs that are an argument
_MOST_STEPS = 3  # drawn: as many shades as a colour has


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
        width: devices of a rank, which share the stages of a model by tensor parallelism: 1, 2, 4
            or 8.
        options: of the first schedule, as in :class:`ScheduleSpec`: ``delay``, ``correction``,
            ``placement``, ``state``, ``n_ranks``, ``accumulate``, ``chains``, ``groups``,
            ``orders`` (lines or one text).

    Raises:
        UserError: an option that no control can hold, or a schedule that no controls make.
    """

    def __init__(  # noqa: PLR0913 - options, by keyword
        self,
        schedule: str | Schedule = "cdp_v2",
        stages: int = 4,
        microbatches: int = 4,
        *,
        compare: str | Schedule | None = None,
        n_steps: int = 3,
        costs: Costs | Callable[[int], Costs] | None = None,
        hardware: Hardware | None = None,
        width: int = 1,
        **options: Any,
    ) -> None:
        if n_steps not in range(1, _MOST_STEPS + 1):
            raise UserError(
                f"n_steps is a whole number from 1 to {_MOST_STEPS}: got {n_steps!r}"
            )
        if width not in _WIDTHS:
            raise UserError(f"width is 1, 2, 4 or 8 devices of a rank: got {width!r}")
        first = chosen_spec(schedule, stages, microbatches, options)
        second = chosen_spec(compare or "dp", first.stages, first.microbatches, {})
        check_same_sizes(first, second)
        self._costs: dict[str, CostsOf] = {UNIFORM: of_any_cut(unit_costs)}
        if costs is not None:
            self._costs[_GIVEN] = of_any_cut(costs)
        self._machines = machines_on_offer(hardware)
        # They fade behind the message if a schedule becomes impossible.
        self._drawn = ["", ""]  # the last pane of each column that was possible
        self._is_switching = False  # while a column's options change together
        # What is shown and possible.
        self._results: list[tuple[Analysis, Timeline]] = []

        self.n_steps = slider("steps drawn", n_steps, _MOST_STEPS)
        self.compare = ui.ToggleButton(
            value=compare is not None,
            description="compare",
            icon="columns",
            layout={"width": "auto", "margin": "2px 2px 2px 100px"},
        )
        self._make_size_and_cost_controls(first, hardware)
        self.width.value = width
        self.columns = [Column(first), Column(second)]
        # A schedule of the user's has its own chains. A name takes the fastest ones.
        if isinstance(schedule, Schedule) and "chains" in options_of(first.method):
            self.columns[0].options["chains"].value = schedule.chains
        self._make_view_and_exports()
        self.shared = (
            self.stages,
            self.microbatches,
            self.n_steps,
            self.costs,
            self.hardware,
            self.width,
            self.batch,
            self.partition,
            self.compare,
        )
        super().__init__(self._rows())
        self.add_class("cdp-explorer")
        self._observe()
        self._redraw()

    def _make_view_and_exports(self) -> None:
        """Make the drawing, and what saves it."""
        self.view = ui.HTML()
        self.folder = field(ui.Text, "export to", value=".", continuous_update=False)
        self.buttons = [
            ui.Button(description=label, icon="download") for label in EXPORTS.values()
        ]
        self.status = ui.HTML()

    def _rows(self) -> list[ui.Widget]:
        """Return the rows of the widget, from top to bottom."""
        return [
            in_columns(*self.shared, min_width="250px"),
            ui.HBox(self.columns, layout={"width": "100%", "grid_gap": "20px"}),
            self.view,
            in_columns(self.folder, ui.HBox(self.buttons), min_width="400px"),
            self.status,
        ]

    def _make_size_and_cost_controls(
        self, first: ScheduleSpec, hardware: Hardware | None
    ) -> None:
        """Make the controls of sizes, of the costs of stages, and of the machine."""
        self.stages = slider("stages", first.stages, _STAGES)
        self.microbatches = slider("micro-batches", first.microbatches, _STAGES)
        tooltip = "uniform: a forward and a whole backward take a slot each; or those of a model"
        models = [*self._costs, *ANALYSED]
        self.costs = field(ui.Dropdown, "stage costs", tooltip, options=models)
        self.costs.value = _GIVEN if _GIVEN in self._costs else UNIFORM
        self.hardware = field(ui.Dropdown, "hardware", options=[*self._machines])
        self.hardware.value = hardware.name if hardware else "unit"
        tooltip = (
            "devices of a rank, which share the stages of a model by tensor parallelism"
        )
        self.width = field(ui.Dropdown, "width", tooltip, options=_WIDTHS)
        tooltip = "images of a micro-batch, for a model on offer"
        self.batch = field(ui.Dropdown, "batch", tooltip, options=_BATCHES, value=BATCH)
        tooltip = "what the stages of a model share equally; the fastest where workers are late"
        cuts = [FASTEST, *MEASURES]
        self.partition = field(ui.Dropdown, "cut by", tooltip, options=cuts)

    def _observe(self) -> None:
        """Redraw after each change of a control, and export at a click."""
        for control in self.shared:
            control.observe(self._redraw, "value")
        for column in self.columns:
            # The default binds this column: without it, all would switch the last one.
            column.schedule.observe(
                lambda _, column=column: self._switch(column), "value"
            )
            for control in (*column.options.values(), column.orders):
                control.observe(self._redraw, "value")
        for kind, button in zip(EXPORTS, self.buttons, strict=True):
            button.on_click(lambda _, kind=kind: self._export(kind))

    @property
    def specs(self) -> list[ScheduleSpec]:
        """The schedules that are shown, as plain values."""
        shown_columns = self.columns[: 1 + self.compare.value]
        return [
            column.spec(self.stages.value, self.microbatches.value)
            for column in shown_columns
        ]

    def to_html(self) -> str:
        """Return a page with what is shown; it needs no network, server or kernel.

        Raises:
            UserError: the last schedule is impossible.
        """
        self._check()
        return HTML.document("Schedules", self.view.value)

    def _check(self) -> None:
        if len(self._results) < len(self.specs):
            raise UserError(
                "nothing is exported while a schedule is impossible: change it first"
            )

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
        drawn = [analysis.schedule for analysis, _ in self._results]
        names = [_file_name(analysis) for analysis, _ in self._results]
        if kind == "png":
            figure = schedules(drawn, self.n_steps.value)
            return save(figure, folder / "_and_".join(names))[:1]
        # Two schedules of one method: their files are numbered.
        if len({*names}) < len(names):
            names = [f"{name}_{number}" for number, name in enumerate(names, 1)]
        ending = {"csv": ".csv", "trace": ".trace.json"}[kind]
        paths = [folder / f"{name}{ending}" for name in names]
        for path, schedule, (_, timeline) in zip(
            paths, drawn, self._results, strict=True
        ):
            if kind == "trace":
                timeline.to_chrome_trace(path)
                continue
            try:
                path.write_text(schedule.to_csv())
            except UserError:  # not a pipeline
                timeline.to_frame().to_csv(path, index=False)
        return paths

    def _export(self, kind: str) -> None:
        try:
            message = "written: " + ", ".join(
                str(path.resolve()) for path in self.export(kind)
            )
        except (ValueError, OSError) as error:
            message = str(error)
        self.status.value = f'<span role="status">{escape(message)}</span>'

    def _switch(self, column: "Column") -> None:
        """Offer another schedule's options, and redraw once afterwards."""
        # Each option that changes calls _redraw, which would draw half-changed specs.
        self._is_switching = True
        column.offer(ScheduleSpec(column.schedule.value))
        self._is_switching = False
        self._redraw()

    def _redraw(self, _: Any = None) -> None:
        """Analyse what is shown, and draw all that is possible on the same scales."""
        if self._is_switching:
            return
        is_uniform = self.costs.value == UNIFORM
        real_machines = [name for name in self._machines if name != "unit"]
        if not is_uniform and self.hardware.value == "unit" and real_machines:
            # A model's times mean nothing on the unit machine. Setting the value calls _redraw
            # again, so this call has nothing left to draw.
            self.hardware.value = real_machines[0]
            return
        show(self.columns[1], self.compare.value)
        for control in (self.batch, self.partition):
            show(control, self.costs.value in ANALYSED)
        # seconds, at first: no figure of other costs meanwhile.
        if self.costs.value in ANALYSED:
            sentence = f"analysing {self.costs.value} in {self.stages.value} stages ..."
            self.view.value = HTML.working(sentence, self.view.value)
        specs = self.specs
        panes = [""] * len(specs)
        results: dict[int, tuple[Analysis, Timeline]] = {}  # by column
        with collector_paused():
            for column, spec in enumerate(specs):
                try:
                    # One impossible schedule leaves the drawing of the other one as it is.
                    results[column] = self._analyse(
                        spec, self.columns[column].free_chains
                    )
                except ValueError as error:
                    panes[column] = HTML.impossible(error, self._drawn[column])
            self._results = [*results.values()]
            pictures = pictures_of(self._results, by_slots=is_uniform)
            # A common frame, so that lengths of both drawings can be compared by eye.
            frame = frame_of(pictures)
            for (column, (analysis, timeline)), picture in zip(
                results.items(), pictures, strict=True
            ):
                self._drawn[column] = pane(analysis, timeline, picture, frame)
                panes[column] = self._drawn[column] + HTML.lines(analysis.spec)
        sentence = ""
        if len(self._results) == 2:
            sentence = verdict(*self._results, in_slots=is_uniform)
        self.view.value = HTML.side_by_side(panes, sentence)

    def _analyse(
        self, spec: ScheduleSpec, free_chains: bool
    ) -> tuple[Analysis, Timeline]:
        """Analyse and simulate a schedule with the costs and on the machine that are chosen."""
        machine = self._machines[self.hardware.value]
        n_devices = self.width.value
        has_model = self.costs.value in ANALYSED
        check_width(n_devices, has_model=has_model)
        if has_model:
            model, batch = self.costs.value, self.batch.value
            costs_of: CostsOf = model_costs(model, batch, n_devices, machine)
        else:
            costs_of = self._costs[self.costs.value]
        hardware = hardware_of_ranks(machine, n_devices)
        spec, form = settled(
            spec, free_chains, self.partition.value, costs_of, hardware
        )
        analysis = replace(analyse(spec, self.n_steps.value), width=n_devices)
        schedule = analysis.schedule
        if has_model:
            # The baseline has the whole model on each device.
            seconds = ddp_seconds(
                model_costs(model, batch),
                machine,
                schedule.n_ranks * n_devices,
                schedule.n_microbatches,
            )
            analysis = replace(analysis, form=form, ddp_seconds=seconds)
        if form is not None:
            return analysis, form.timeline
        return analysis, predict(
            analysis, costs_of(schedule.n_stages, MEASURES[0]), hardware
        )


def _file_name(analysis: Analysis) -> str:
    if analysis.spec.method == RANK_ORDERS:
        return Path(ORDERS_FILE).stem
    schedule = analysis.schedule
    return f"{analysis.spec.method}_{schedule.n_stages}x{schedule.n_microbatches}"
