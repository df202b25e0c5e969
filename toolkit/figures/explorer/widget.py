"""Schedules to play with in a notebook: controls, and what each change does to the costs."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as ui

from toolkit.cost.hardware import check_hardware
from toolkit.errors import UserError
from toolkit.figures.explorer import controls, page
from toolkit.figures.explorer.choice import LARGEST, OWN, Choice, check_sizes, choice_of
from toolkit.figures.explorer.controls import FIELD, Column, in_columns
from toolkit.figures.explorer.drawing import draw, frame_of
from toolkit.figures.explorer.inspection import Analysis, analyse, find, predict
from toolkit.schedule import Schedule
from toolkit.schedule.instruction import collector_paused

if TYPE_CHECKING:
    from torch import Tensor, nn

    from toolkit.cost import Hardware, StageCost, Timeline
    from toolkit.schedule.staleness import Delay

_STAGES = 16  # that the slider begins with
_MOST_STEPS = 3  # drawn: as many shades as a colour has


class Explorer(ui.VBox):
    """An interactive view of schedules, one or two side by side.

    It computes nothing of its own: schedules, programs, steady states and timelines are the
    toolkit's. Wrong values show a sentence, and the drawing before them fades.

    Args:
        schedule: a choice of conf/schedule, or ``"your own"`` with ``orders``; or a
            :class:`~toolkit.schedule.Schedule`, which tells sizes and options, too.
        stages: parts of the model.
        microbatches: of a training step.
        compare: another schedule to show beside it, likewise; one of the same sizes.
        delay, predict, placement, state, n_ranks, accumulate, orders: of the first schedule, as
            in :class:`Choice`; orders also as text of several lines.
        n_steps: training steps drawn, 1 to 3.
        costs: of the stages, by :func:`toolkit.cost.profile`; uniform unless given.
        model: whose stages are profiled on demand, with ``example``, a micro-batch.
        example: see ``model``.
        hardware: what is simulated; the presets of conf/hardware can be chosen, too.
        folder: where exports are written.

    Raises:
        ValueError: ``n_steps`` is another number, ``hardware`` is none, or no controls make the
            schedule.
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
                f" {microbatches} micro-batches beside {second.stages} and {second.microbatches}"
            )
        wrong = [_complaint(choice) for choice in (first, second)]
        columns = [
            Column(Choice() if complaint else choice)
            for choice, complaint in zip((first, second), wrong, strict=True)
        ]
        self.columns = columns
        self._analyses: list[tuple[Analysis, Timeline] | None] = [None, None]
        self._panes = ["", ""]
        self._wrong = ["", ""]
        self._quiet = False
        self._shared_controls(stages, microbatches, n_steps, compare is not None)
        self._machine_controls(costs, model, example, hardware)
        self._export_controls(Path(folder))
        sizes = (self.stages, self.microbatches, self.n_steps)
        self.shared = (*sizes, self.costs, self.hardware, self.compare)
        self.head = ui.HTML(page.styles())
        super().__init__(
            [
                self.head,
                in_columns(*self.shared, least="250px"),
                ui.HBox(
                    [column.box for column in columns], layout={"width": "100%", "grid_gap": "16px"}
                ),
                ui.HTML(page.legend()),
                in_columns(self.folder, ui.HBox(self.buttons), least="400px"),
                self.status,
            ]
        )
        self.add_class("cdp-explorer")
        self._listen()
        self._refresh()
        for k, complaint in enumerate(wrong):
            if complaint:
                self._refuse(k, complaint)

    @property
    def choices(self) -> list[Choice]:
        """What is shown, as values."""
        sizes = self.stages.value, self.microbatches.value
        return [column.choice(*sizes) for column in self._shown]

    def to_html(self) -> str:
        """A page of its own with what is shown: no script, no network, no kernel.

        Raises:
            ValueError: what was asked for last cannot be.
        """
        for sentence in self._wrong[: len(self._shown)]:
            if sentence:
                raise UserError(sentence)
        return self._page()

    def _page(self) -> str:
        lines = "".join(column.lines.value for column in self._shown)
        wrong = "".join(column.message.value for column in self._shown)
        body = wrong + page.side_by_side(self._panes[: len(self._shown)]) + page.legend() + lines
        return page.standalone("Schedules", body)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and the page for where widgets cannot be shown."""
        return {**super()._repr_mimebundle_(**kwargs), "text/html": self._page()}

    @property
    def _shown(self) -> list[Column]:
        return self.columns[: 1 + self.compare.value]

    def _shared_controls(self, stages: int, microbatches: int, n_steps: int, compare: bool) -> None:
        def slider(value: int, name: str) -> ui.IntSlider:
            known = isinstance(value, int) and 0 <= value <= LARGEST
            most = max(_STAGES, value) if known else _STAGES
            return ui.IntSlider(
                value=value if known else 4,
                min=0,
                max=most,
                description=name,
                continuous_update=False,
                **FIELD,
            )

        self.stages = slider(stages, "stages")
        self.microbatches = slider(microbatches, "micro-batches")
        self.n_steps = ui.IntSlider(
            value=n_steps,
            min=1,
            max=_MOST_STEPS,
            description="steps drawn",
            continuous_update=False,
            **FIELD,
        )
        self.compare = ui.ToggleButton(
            value=compare,
            description="compare",
            icon="columns",
            layout={"width": "auto", "margin": "2px 2px 2px 100px"},
        )

    def _machine_controls(
        self,
        costs: "Sequence[StageCost] | None",
        model: "nn.Module | None",
        example: "Tensor | tuple[Tensor, ...] | None",
        hardware: "Hardware | None",
    ) -> None:
        self._sources, self._machines = controls.cost_sources(), controls.hardware_presets()
        chosen, machine = controls.UNIFORM, "unit"
        if costs is not None:
            chosen = controls.GIVEN
            self._sources[chosen] = controls.given(costs)
        if model is not None:
            chosen = type(model).__name__
            self._sources[chosen] = controls.profiled(model, example)
        if hardware is not None:
            check_hardware(hardware)
            machine = hardware.name
            self._machines[machine] = hardware
        elif chosen != controls.UNIFORM:
            machine = self._real()
        self.costs = ui.Dropdown(
            options=[*self._sources], value=chosen, description="stage costs", **FIELD
        )
        self.costs.tooltip = "uniform: a forward and a whole backward take a slot each"
        self.hardware = ui.Dropdown(
            options=[*self._machines], value=machine, description="hardware", **FIELD
        )

    def _export_controls(self, folder: Path) -> None:
        self.folder = ui.Text(
            value=str(folder), description="export to", continuous_update=False, **FIELD
        )
        kinds: dict[str, Callable[[], list[Path]]] = {
            "PNG": self.export_png,
            "CSV": self.export_csv,
            "Chrome trace": self.export_trace,
        }
        self.buttons = []
        for name, write in kinds.items():
            button = ui.Button(description=name, icon="download", layout={"width": "130px"})
            button.tooltip = f"write what is shown as {name}"
            button.on_click(lambda _, write=write: self._export(write))
            self.buttons.append(button)
        self.status = ui.HTML()

    def export_png(self) -> list[Path]:
        """Write the figure of what is shown, as PNG and SVG; return the PNG's path."""
        return page.write_png([analysis for analysis, _ in self._good()], self._folder)

    def export_csv(self) -> list[Path]:
        """Write the rank orders of each schedule, or its ops where it is no pipeline."""
        return page.write_csv([analysis for analysis, _ in self._good()], self._folder)

    def export_trace(self) -> list[Path]:
        """Write the simulated timeline of each schedule, for ui.perfetto.dev."""
        analyses, timelines = zip(*self._good(), strict=True)
        return page.write_traces(analyses, timelines, self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self.folder.value or ".").expanduser()

    def _good(self) -> "list[tuple[Analysis, Timeline]]":
        found = [self._analyses[k] for k in range(len(self._shown))]
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
        for control in (self.stages, self.microbatches, self.n_steps, self.hardware):
            control.observe(self._refresh, "value")
        self.compare.observe(self._refresh, "value")
        self.costs.observe(self._switch_costs, "value")
        for k, column in enumerate(self.columns):
            for control in column.controls[1:]:
                control.observe(lambda _, k=k: self._refresh_one(k), "value")
            column.schedule.observe(lambda _, k=k: self._switch(k), "value")
            column.wanted.observe(lambda _, k=k: self._look_up(k), "value")

    def _switch(self, k: int) -> None:
        """Another schedule: it has other options."""
        self._quiet = True
        try:
            self.columns[k].offer()
        finally:
            self._quiet = False
        self._refresh_one(k)

    def _switch_costs(self, _: Any = None) -> None:
        """A model's stages take no time on the unit machine that would mean anything."""
        self._quiet = True
        try:
            if self.costs.value != controls.UNIFORM and self.hardware.value == "unit":
                self.hardware.value = self._real()
        finally:
            self._quiet = False
        self._refresh()

    def _real(self) -> str:
        """The first preset of real hardware, if there is one."""
        return next((name for name in self._machines if name != "unit"), "unit")

    def _refresh(self, _: Any = None) -> None:
        if self._quiet:
            return
        self.columns[1].box.layout.display = None if self.compare.value else "none"
        self._redraw(range(len(self._shown)))

    def _refresh_one(self, k: int) -> None:
        if not self._quiet:
            self._redraw([k])

    def _redraw(self, changed: Iterable[int]) -> None:
        with collector_paused():
            for k in changed:
                self._analyse(k)
            self._show()

    def _analyse(self, k: int) -> None:
        """Look at what is chosen anew, or say what is wrong with it."""
        column = self.columns[k]
        choice = column.choice(self.stages.value, self.microbatches.value)
        try:
            analysis = analyse(choice, self.n_steps.value)
            costs = self._sources[self.costs.value](analysis.schedule.n_stages)
            timeline = predict(analysis, costs, self._machines[self.hardware.value])
        except ValueError as error:
            self._refuse(k, str(error))
        else:
            self._analyses[k] = analysis, timeline
            column.message.value = self._wrong[k] = ""
            column.say(choice)
        self._look_up(k)

    def _show(self) -> None:
        """Draw all that is right, on the same scales."""
        good = {k: found for k, found in enumerate(self._analyses[: len(self._shown)]) if found}
        if not good:
            return
        frame = frame_of([analysis for analysis, _ in good.values()])
        for k, (analysis, timeline) in good.items():
            drawn = draw(analysis.choice, self.n_steps.value, frame)
            numbers = analysis.numbers(timeline, in_slots=self.costs.value == controls.UNIFORM)
            self._panes[k] = page.pane(analysis.schedule, numbers, drawn)
            self.columns[k].figure.value = self._panes[k]

    def _refuse(self, k: int, message: str) -> None:
        """Say what is wrong; what was right before it stays, faded."""
        sentence, _, grid = message.partition("\n")
        self._analyses[k] = None
        self._wrong[k] = sentence
        self.columns[k].message.value = page.message(sentence, grid)
        self.columns[k].figure.value = page.faded(self._panes[k])

    def _look_up(self, k: int) -> None:
        column, good = self.columns[k], self._analyses[k]
        wanted = column.wanted.value.strip()
        column.found.value = ""
        if wanted and good:
            column.found.value = page.looked_up(find(good[0].drawn, wanted))


def _chosen(
    schedule: str | Schedule, stages: int, microbatches: int, options: dict[str, Any]
) -> Choice:
    """What is shown first: by its name, or the choice that makes a schedule."""
    if isinstance(schedule, str):
        return Choice(schedule, stages, microbatches, **options)
    if not isinstance(schedule, Schedule):
        raise UserError(f"a schedule is a Schedule, or a name such as 'cdp_v2': got {schedule!r}")
    if given := [name for name, value in options.items() if value not in (None, ())]:
        raise UserError(f"a Schedule tells its options itself: leave out {', '.join(given)}")
    check_sizes(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    found = choice_of(schedule)
    if found is None:
        raise UserError(
            f"no controls of the explorer make {schedule!r}: it takes schedules of the catalogue,"
            " and rank orders that drain; toolkit.figures.schedules draws any"
        )
    return found


def _complaint(choice: Choice) -> str:
    """What no control can hold of ``choice``."""
    try:
        choice.given  # noqa: B018
        check_sizes(choice.stages, choice.microbatches, choice.accumulate)
        if choice.orders and choice.schedule != OWN:
            raise UserError(f"orders are those of schedule={OWN!r}: got {choice.schedule!r}")
    except ValueError as error:
        return str(error)
    return ""
