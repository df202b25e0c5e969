"""Schedules to play with in a notebook: controls, and what each change does to the costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as ui

from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError
from toolkit.figures.explorer import page
from toolkit.figures.explorer.choice import Choice, check_sizes, choice_of
from toolkit.figures.explorer.controls import (
    UNIFORM,
    Column,
    cost_sources,
    field,
    hardware_presets,
    in_columns,
    profiled,
    show,
)
from toolkit.figures.explorer.drawing import draw, frame_of
from toolkit.figures.explorer.inspection import Analysis, analyse, find, predict
from toolkit.schedule import Schedule
from toolkit.schedule.instruction import collector_paused

if TYPE_CHECKING:
    from torch import Tensor, nn

    from toolkit.cost import Hardware, StageCost, Timeline
    from toolkit.schedule.staleness import Delay

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
        delay, predict, placement, state, n_ranks, accumulate, orders: of the first schedule, as
            in :class:`Choice`; orders also as text of several lines.
        n_steps: training steps drawn, 1 to 3.
        costs: of the stages, by :func:`toolkit.cost.profile`; uniform unless given.
        model: whose stages are profiled on demand, with ``example``, a micro-batch.
        example: see ``model``.
        hardware: what is simulated; the presets of conf/hardware can be chosen, too.
        folder: where exports are written.

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
        delay: "Delay | None" = None,
        predict: bool | None = None,
        placement: str | None = None,
        state: str | None = None,
        n_ranks: int | None = None,
        accumulate: int | None = None,
        orders: str | Sequence[str] = (),
        n_steps: int = 3,
        costs: "Sequence[StageCost] | None" = None,
        model: "nn.Module | None" = None,
        example: "Tensor | tuple[Tensor, ...] | None" = None,
        hardware: "Hardware | None" = None,
        folder: str | Path = ".",
    ) -> None:
        if n_steps not in range(1, _MOST_STEPS + 1):
            raise UserError(f"n_steps is a whole number from 1 to {_MOST_STEPS}: got {n_steps!r}")
        options: dict[str, Any] = {
            "delay": delay,
            "predict": predict,
            "placement": placement,
            "state": state,
            "n_ranks": n_ranks,
            "accumulate": accumulate,
            "orders": tuple(orders.splitlines() if isinstance(orders, str) else orders),
        }
        first = _chosen(schedule, stages, microbatches, options)
        if isinstance(schedule, Schedule):
            stages, microbatches = first.stages, first.microbatches
        second = _chosen(compare or "dp", stages, microbatches, {})
        if (second.stages, second.microbatches) != (stages, microbatches):
            raise UserError(
                f"schedules side by side have the same sizes: got {stages} stages and"
                f" {microbatches} micro-batches, and {second.stages} and {second.microbatches}"
            )
        self.columns = [Column(choice) for choice in (first, second)]
        self._analyses: list[tuple[Analysis, Timeline] | None] = [None, None]
        self._panes, self._wrong = ["", ""], ["", ""]
        self._quiet = False
        self._sources, self._machines = cost_sources(), hardware_presets()
        source, machine = UNIFORM, "unit"
        if costs is not None:
            source = "given"
            self._sources[source] = lambda n_stages: costs  # simulation refuses another number
        if model is not None:
            source = type(model).__name__
            self._sources[source] = profiled(model, example)
        if hardware is not None:
            check_hardware(hardware)
            machine = hardware.name
            self._machines[machine] = hardware
        elif source != UNIFORM:
            machine = self._real()

        def slider(name: str, value: int, most: int) -> ui.IntSlider:
            return field(ui.IntSlider, name, value=value, min=1, max=most, continuous_update=False)

        self.stages = slider("stages", stages, max(_STAGES, stages))
        self.microbatches = slider("micro-batches", microbatches, max(_STAGES, microbatches))
        self.n_steps = slider("steps drawn", n_steps, _MOST_STEPS)
        self.costs = field(
            ui.Dropdown,
            "stage costs",
            "uniform: a forward and a whole backward take a slot each",
            options=[*self._sources],
            value=source,
        )
        self.hardware = field(ui.Dropdown, "hardware", options=[*self._machines], value=machine)
        self.compare = ui.ToggleButton(
            value=compare is not None,
            description="compare",
            icon="columns",
            layout={"width": "auto", "margin": "2px 2px 2px 100px"},
        )
        self.folder = field(ui.Text, "export to", value=str(folder), continuous_update=False)
        self.buttons, self.status = [], ui.HTML()
        for name, write in (
            ("PNG", self.export_png),
            ("CSV", self.export_csv),
            ("Chrome trace", self.export_trace),
        ):
            tip = f"write what is shown as {name}"
            button = ui.Button(
                description=name, icon="download", tooltip=tip, layout={"width": "130px"}
            )
            button.on_click(lambda _, write=write: self._export(write))
            self.buttons.append(button)
        sizes = (self.stages, self.microbatches, self.n_steps)
        self.shared = (*sizes, self.costs, self.hardware, self.compare)
        boxes = [column.box for column in self.columns]
        super().__init__(
            [
                ui.HTML(page.styles()),
                in_columns(*self.shared, least="250px"),
                ui.HBox(boxes, layout={"width": "100%", "grid_gap": "16px"}),
                ui.HTML(page.LEGEND),
                in_columns(self.folder, ui.HBox(self.buttons), least="400px"),
                self.status,
            ]
        )
        self.add_class("cdp-explorer")
        self._listen()
        self._refresh()

    @property
    def choices(self) -> list[Choice]:
        """What is shown, as values."""
        sizes = self.stages.value, self.microbatches.value
        return [column.choice(*sizes) for column in self._shown]

    def to_html(self) -> str:
        """A page of its own with what is shown: no script, no network, no kernel.

        Raises:
            UserError: the last choice is impossible.
        """
        for sentence in self._wrong[: len(self._shown)]:
            if sentence:
                raise UserError(sentence)
        return self._page()

    def _page(self) -> str:
        lines = "".join(column.lines.value for column in self._shown)
        wrong = "".join(column.message.value for column in self._shown)
        body = wrong + page.side_by_side(self._panes[: len(self._shown)]) + page.LEGEND + lines
        return page.standalone("Schedules", body)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and the page for where widgets cannot be shown."""
        return {**super()._repr_mimebundle_(**kwargs), "text/html": self._page()}

    @property
    def _shown(self) -> list[Column]:
        return self.columns[: 1 + self.compare.value]

    def export_png(self) -> list[Path]:
        """Write the figure of what is shown, as PNG and SVG; return the PNG's path."""
        return page.write_png([analysis for analysis, _ in self._good()], self._folder)

    def export_csv(self) -> list[Path]:
        """Write the rank orders of each pipeline, or the ops of any other schedule."""
        return page.write_csv([analysis for analysis, _ in self._good()], self._folder)

    def export_trace(self) -> list[Path]:
        """Write the simulated timeline of each schedule, for ui.perfetto.dev."""
        analyses, timelines = zip(*self._good(), strict=True)
        return page.write_traces(analyses, timelines, self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self.folder.value or ".").expanduser()

    def _good(self) -> "list[tuple[Analysis, Timeline]]":
        found = self._analyses[: len(self._shown)]
        good = [one for one in found if one is not None]
        if len(good) < len(found):
            raise UserError("nothing is exported while a schedule is wrong: mend it first")
        return good

    def _export(self, write: Callable[[], list[Path]]) -> None:
        self.status.value = '<span role="status">writing ...</span>'
        try:
            said = "written: " + ", ".join(str(path.resolve()) for path in write())
        except ValueError as error:
            said = str(error)
        except OSError as error:
            said = f"{error.filename or self._folder}: {error.strerror}"
        self.status.value = f'<span role="status">{escape(said)}</span>'

    def _listen(self) -> None:
        self.costs.observe(self._switch_costs, "value")
        for control in self.shared:
            control.observe(self._refresh, "value")
        for k, column in enumerate(self.columns):
            column.schedule.observe(lambda _, k=k: self._switch(k), "value")
            for control in (*column.options.values(), column.orders):
                control.observe(lambda _, k=k: self._redraw([k]), "value")
            column.wanted.observe(lambda _, k=k: self._look_up(k), "value")

    @contextmanager
    def _silently(self) -> Iterator[None]:
        """Change controls within, and redraw once afterwards."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _switch(self, k: int) -> None:
        """Another schedule has other options."""
        with self._silently():
            self.columns[k].offer(Choice(self.columns[k].schedule.value))
        self._redraw([k])

    def _switch_costs(self, _: Any) -> None:
        """Choose real hardware for a model, whose times mean nothing on the unit machine."""
        if self.costs.value != UNIFORM and self.hardware.value == "unit":
            with self._silently():
                self.hardware.value = self._real()

    def _real(self) -> str:
        """The first preset of real hardware, if there is one."""
        return next((name for name in self._machines if name != "unit"), "unit")

    def _refresh(self, _: Any = None) -> None:
        show(self.columns[1].box, self.compare.value)
        self._redraw(range(len(self._shown)))

    def _redraw(self, changed: Iterable[int]) -> None:
        """Analyse what changed, and draw all that is right on the same scales."""
        if self._quiet:
            return
        with collector_paused():
            for k in changed:
                self._analyse(k)
            found = enumerate(self._analyses[: len(self._shown)])
            good = {k: one for k, one in found if one is not None}
            if not good:
                return
            frame = frame_of([analysis for analysis, _ in good.values()])
            for k, (analysis, timeline) in good.items():
                drawn = draw(analysis.choice, self.n_steps.value, frame)
                numbers = analysis.numbers(timeline, in_slots=self.costs.value == UNIFORM)
                self._panes[k] = page.pane(analysis.schedule, numbers, drawn)
                self.columns[k].figure.value = self._panes[k]

    def _analyse(self, k: int) -> None:
        """Analyse the choice of column ``k``; if it is impossible, say why and fade the drawing."""
        column, sentence, grid = self.columns[k], "", ""
        choice = column.choice(self.stages.value, self.microbatches.value)
        try:
            analysis = analyse(choice, self.n_steps.value)
            costs = self._sources[self.costs.value](analysis.schedule.n_stages)
            timeline = predict(analysis, costs, self._machines[self.hardware.value])
        except ValueError as error:
            sentence, _, grid = str(error).partition("\n")
            self._analyses[k] = None
            column.figure.value = page.faded(self._panes[k])
        else:
            self._analyses[k] = analysis, timeline
            column.say(choice)
        self._wrong[k] = sentence
        column.message.value = page.message(sentence, grid) if sentence else ""
        self._look_up(k)

    def _look_up(self, k: int) -> None:
        column, good = self.columns[k], self._analyses[k]
        wanted = column.wanted.value.strip()
        column.found.value = page.looked_up(find(good[0].drawn, wanted)) if wanted and good else ""


def _chosen(
    schedule: str | Schedule, stages: int, microbatches: int, options: dict[str, Any]
) -> Choice:
    """The choice by name and options, or the one that makes a schedule."""
    if isinstance(schedule, str):
        choice = Choice(schedule, stages, microbatches, **options)
        choice.check()
        return choice
    if not isinstance(schedule, Schedule):
        raise UserError(f"a schedule is a Schedule, or a name such as 'cdp_v2': got {schedule!r}")
    if given := [name for name, value in options.items() if value not in (None, ())]:
        raise UserError(f"a Schedule has its own options: leave out {', '.join(given)}")
    check_sizes(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    found = choice_of(schedule)
    if found is None:
        raise UserError(
            f"no controls of the explorer make {schedule!r}: it takes schedules of the catalogue,"
            " and rank orders that drain; toolkit.figures.schedules draws any"
        )
    return found
