"""One schedule of the explorer: the controls that choose it, and what is shown of it."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as ui

from toolkit.cost import UNIT, Hardware, StageCost, profile, unit_costs
from toolkit.cost.hardware import presets
from toolkit.errors import UserError, first_line
from toolkit.figures.explorer.choice import LARGEST, OWN, SCHEDULES, Choice, options_of
from toolkit.schedule import FRESHEST, PLACEMENTS, STATES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from toolkit.model import InputSpec

FIELD: dict[str, Any] = {"layout": {"width": "auto"}, "style": {"description_width": "96px"}}
_DELAYS = (0, 1, 2, 3, FRESHEST)
_EXAMPLE = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
_VALUES: dict[str, Sequence[Any]] = {"delay": _DELAYS, "placement": PLACEMENTS, "state": STATES}
_FIXED = {"delay": "0", "placement": "per_stage", "state": "replicated"}
_FIXED_OF = {
    ("pipedream_2bw", "delay"): "1",
    ("published", "delay"): "by stage and worker",
    ("gradient_accumulation", "placement"): "one",
    (OWN, "placement"): "by the orders",
}


class Column:
    """Controls and figure of one schedule.

    Attributes:
        controls: what chooses the schedule, beside its sizes.
        message: what is wrong, or nothing.
        figure: the schedule, as HTML.
        wanted: an op to look up, such as ``2F1``; found: what it waits for and frees.
        state: the choice as a line of Python and as overrides.
    """

    def __init__(self, choice: Choice) -> None:
        self.schedule = ui.Dropdown(
            options=SCHEDULES, value=choice.schedule, description="schedule", **FIELD
        )
        self.delay = ui.Dropdown(description="delay", **FIELD)
        self.predict = ui.Checkbox(value=bool(choice.predict), description="predict", **FIELD)
        self.placement = ui.Dropdown(description="placement", **FIELD)
        self.state = ui.Dropdown(description="state", **FIELD)
        self.n_ranks = ui.BoundedIntText(
            value=choice.n_ranks or 2, min=1, max=64, description="ranks", **FIELD
        )
        self.accumulate = ui.BoundedIntText(
            value=choice.accumulate or 1, min=1, max=LARGEST, description="accumulate", **FIELD
        )
        self.orders = ui.Textarea(
            value="\n".join(choice.orders) or _EXAMPLE,
            description="rank orders",
            placeholder="a line a rank, such as 0F0 0F1 0B0 0B1",
            rows=4,
            continuous_update=False,
            **FIELD,
        )
        self.schedule.tooltip = "a choice of conf/schedule, or rank orders of your own"
        self.delay.tooltip = "training steps by which weights are late"
        self.predict.tooltip = "extrapolate late weights to the step that reads them"
        self.placement.tooltip = "the rank of each op"
        self.state.tooltip = "whether parameters, gradients and optimizer state have one owner"
        self.accumulate.tooltip = "micro-batches that each worker runs one after another in a step"
        self.orders.tooltip = "each rank's ops in order: stage, kind (F, B, I or W), micro-batch"
        late = (self.delay, self.predict)
        options = (*late, self.placement, self.state, self.n_ranks, self.accumulate)
        fields = (self.schedule, *options, self.orders)
        self.wanted = ui.Text(
            description="look up an op",
            placeholder="such as 2F1",
            continuous_update=False,
            **FIELD,
        )
        self.found, self.message, self.figure, self.lines = (ui.HTML() for _ in range(4))
        self.controls = fields
        grid = in_columns(*fields[:-1], least="260px")
        self.box = ui.VBox(
            [grid, self.orders, self.message, self.figure, self.wanted, self.found, self.lines],
            layout={"flex": "1 1 0", "min_width": "0", "overflow": "hidden"},
        )
        self.box.add_class("cdp-column")
        self.offer(choice)

    def offer(self, choice: Choice | None = None) -> None:
        """Offer the options that the schedule takes, as it has them or as ``choice`` has."""
        name = self.schedule.value
        usual = options_of(name)
        for option, values in _VALUES.items():
            control = getattr(self, option)
            if option in usual:
                given = getattr(choice, option) if choice else None
                value = usual[option] if given is None else given
                offered = values if value in values else (*values, value)
                control.options = [(str(v), v) for v in offered]
                control.value = value
            else:
                fixed = _FIXED_OF.get((name, option), _FIXED[option])
                control.options = [fixed]
            control.disabled = option not in usual
        if choice is None:
            self.n_ranks.value = usual.get("n_ranks") or self.n_ranks.value
            self.accumulate.value = usual.get("accumulate") or self.accumulate.value
            self.predict.value = usual.get("predict", False)
        _show(self.n_ranks, "n_ranks" in usual)
        _show(self.accumulate, "accumulate" in usual)
        _show(self.predict, "predict" in usual)
        _show(self.orders, name == OWN)

    def choice(self, stages: int, microbatches: int) -> Choice:
        """What the controls say."""
        name = self.schedule.value
        if name == OWN:
            orders = tuple(line.strip() for line in self.orders.value.splitlines() if line.strip())
            return Choice(OWN, **self._options(), orders=orders)
        return Choice(name, stages, microbatches, **self._options())

    def _options(self) -> dict[str, Any]:
        return {option: getattr(self, option).value for option in options_of(self.schedule.value)}

    def say(self, choice: Choice) -> None:
        """Show ``choice`` as lines to copy."""
        fields = {"Python": choice.python()}
        try:
            fields["overrides"] = choice.overrides()
        except ValueError as error:
            fields["overrides"] = str(error)
        self.lines.value = "".join(_line(name, value) for name, value in fields.items())


def in_columns(*widgets: ui.Widget, least: str) -> ui.GridBox:
    """As many columns as there is room for, all alike."""
    columns = f"repeat(auto-fit, minmax({least}, 1fr))"
    return ui.GridBox(widgets, layout={"grid_template_columns": columns, "width": "100%"})


def _line(name: str, value: str) -> str:
    label = f"{name}: the schedule as text to copy"
    return (
        f'<label class="cdp-line"><span>{name}</span><input readonly value="{escape(value)}"'
        f' aria-label="{label}" onfocus="this.select()"></label>'
    )


def _show(widget: ui.DOMWidget, visible: bool) -> None:
    widget.layout.display = None if visible else "none"


UNIFORM = "uniform"
GIVEN = "given"
IMAGE_MODELS = ("resnet18", "resnet50", "vit_b_16")
_SAMPLES = 8  # of a micro-batch

Costs = Callable[[int], Sequence[StageCost]]
"""From the number of stages to what each costs."""


def hardware_presets() -> dict[str, Hardware]:
    """By name: the unit machine, and those of conf/hardware; a warning where that is missing."""
    try:
        return {"unit": UNIT} | presets()
    except ValueError as missing:
        warnings.warn(f"the explorer offers the unit machine alone: {missing}", stacklevel=2)
        return {"unit": UNIT}


def cost_sources() -> dict[str, Costs]:
    """By name: uniform stages, and those of models profiled on meta tensors."""
    images = {
        f"{name}, {_SAMPLES} images": _made(partial(_of_images, name)) for name in IMAGE_MODELS
    }
    return {UNIFORM: unit_costs, **images, f"gpt2, {_SAMPLES} sequences": _made(_gpt2)}


def given(costs: Sequence[StageCost]) -> Costs:
    """Costs that are known, for one number of stages; simulation refuses others."""
    return lambda n_stages: costs


def profiled(model: "nn.Module", example: "Tensor | tuple[Tensor, ...] | None") -> Costs:
    """Those of ``model``, cut and profiled when they are first asked for.

    They raise a ValueError if it cannot be traced, cut or run.
    """
    from toolkit.model import partition

    known: dict[int, Sequence[StageCost]] = {}

    def costs(n_stages: int) -> Sequence[StageCost]:
        if example is None:
            raise UserError("a model is profiled on an example: give a micro-batch, example=...")
        if n_stages not in known:
            try:
                stages = partition(model, n_stages, example)
                known[n_stages] = profile(stages, example)
            except ValueError:
                raise
            except Exception as error:  # the model's own code may raise anything
                who = type(model).__name__
                raise UserError(f"{who} cannot be profiled: {first_line(error)}") from error
        return known[n_stages]

    return costs


def _made(make: "Callable[[], tuple[nn.Module, InputSpec]]") -> Costs:
    """Those of a model that is made, on the meta device, when they are first asked for."""
    made: list[Costs] = []

    def costs(n_stages: int) -> Sequence[StageCost]:
        import torch

        if not made:
            with torch.device("meta"):
                model, form = make()
            made.append(profiled(model, form.example(_SAMPLES, "meta")))
        return made[0](n_stages)

    return costs


def _of_images(name: str) -> "tuple[nn.Module, InputSpec]":
    from toolkit.model import Images, build

    return build(name), Images(3, 224, 224, 1000)


def _gpt2() -> "tuple[nn.Module, InputSpec]":
    from toolkit.model import Sequences, gpt

    form = Sequences(1024, 50257)
    return gpt(**form.arguments, layers=12, width=768, heads=12), form
