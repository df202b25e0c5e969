"""The explorer's controls: those of one schedule, and the costs and machines to choose from."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import ipywidgets as ui

from toolkit.cost import UNIT, Hardware, StageCost, profile, unit_costs
from toolkit.cost.hardware import presets
from toolkit.errors import UserError
from toolkit.figures.explorer.choice import LARGEST, OWN, SCHEDULES, Choice, options_of
from toolkit.schedule import FRESHEST, PLACEMENTS, STATES

UNIFORM = "uniform"
_EXAMPLE = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
_MODELS = ("resnet18", "resnet50", "vit_b_16", "gpt2")
_SAMPLES = 8  # of a micro-batch
_OPTIONS: dict[str, tuple[str, Sequence[Any]]] = {  # what it is, and the values on offer
    "delay": ("training steps by which weights are late", (0, 1, 2, 3, FRESHEST)),
    "predict": ("extrapolate late weights to the step that reads them", (False, True)),
    "placement": ("the rank of each op", PLACEMENTS),
    "state": ("whether parameters, gradients and optimizer state have one owner", STATES),
    "n_ranks": ("devices of an interleaved pipeline", range(2, 2 * LARGEST + 1)),
    "accumulate": ("micro-batches of a worker, one after another", range(1, LARGEST + 1)),
}


def field(kind: Callable[..., Any], name: str, tip: str | None = None, **options: Any) -> Any:
    """A labelled control as wide as its place."""
    look = {"layout": {"width": "auto"}, "style": {"description_width": "96px"}}
    return kind(description=name, tooltip=tip, **look, **options)


def in_columns(*widgets: ui.Widget, least: str) -> ui.GridBox:
    """As many equal columns as there is room for."""
    columns = f"repeat(auto-fit, minmax({least}, 1fr))"
    return ui.GridBox(widgets, layout={"grid_template_columns": columns, "width": "100%"})


def show(widget: ui.DOMWidget, visible: bool) -> None:
    """Show or hide ``widget``."""
    widget.layout.display = None if visible else "none"


class Column:
    """Controls of one schedule: its name, its options by name, and rank orders."""

    def __init__(self, choice: Choice) -> None:
        tip = "a choice of conf/schedule, or rank orders of your own"
        names = {"options": SCHEDULES, "value": choice.schedule}
        self.schedule = field(ui.Dropdown, "schedule", tip, **names)
        self.options = {name: field(ui.Dropdown, name, tip) for name, (tip, _) in _OPTIONS.items()}
        tip = "each rank's ops in order: stage, kind (F, B, I or W), micro-batch"
        lines: dict[str, Any] = {"value": "\n".join(choice.orders) or _EXAMPLE, "rows": 4}
        self.orders = field(ui.Textarea, "rank orders", tip, continuous_update=False, **lines)
        grid = in_columns(self.schedule, *self.options.values(), least="260px")
        self.box = ui.VBox([grid, self.orders], layout={"flex": "1 1 0", "min_width": "0"})
        self.box.add_class("cdp-column")
        self.offer(choice)

    def offer(self, choice: Choice) -> None:
        """Offer the options that the schedule takes, with the values of ``choice``."""
        usual = options_of(choice.schedule)
        for name, control in self.options.items():
            values, given = _OPTIONS[name][1], getattr(choice, name)
            value = usual.get(name) if given is None else given
            value = values[0] if value is None else value
            control.options = [(str(v), v) for v in dict.fromkeys((*values, value))]
            control.value = value
            show(control, name in usual)
        show(self.orders, choice.schedule == OWN)

    def choice(self, stages: int, microbatches: int) -> Choice:
        """The choice that the controls hold."""
        name = self.schedule.value
        options = {option: self.options[option].value for option in options_of(name)}
        if name == OWN:
            return Choice(OWN, orders=lines_of(self.orders.value), **options)
        return Choice(name, stages, microbatches, **options)


def lines_of(text: str) -> tuple[str, ...]:
    """Lines of ``text`` that are not blank."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


Costs = Callable[[int], Sequence[StageCost]]
"""From the number of stages to what each costs."""


def hardware_presets() -> dict[str, Hardware]:
    """The unit machine and those of conf/hardware, by name; warns where that is missing."""
    try:
        return {"unit": UNIT} | presets()
    except UserError as missing:
        warnings.warn(f"the explorer offers the unit machine alone: {missing}", stacklevel=2)
        return {"unit": UNIT}


def cost_sources() -> dict[str, Costs]:
    """Uniform stages, and the stages of models profiled on meta tensors, by name."""
    kinds = {name: "sequences" if name == "gpt2" else "images" for name in _MODELS}
    models = {f"{name}, {_SAMPLES} {kind}": partial(_preset, name) for name, kind in kinds.items()}
    return {UNIFORM: unit_costs, **models}


@cache
def _preset(name: str, n_stages: int) -> Sequence[StageCost]:
    """Costs of a model by name, made on the meta device."""
    import torch

    from toolkit.model import Images, InputSpec, Sequences, build, gpt, partition

    form: InputSpec
    with torch.device("meta"):
        if name == "gpt2":
            form = Sequences(1024, 50257)
            model = gpt(**form.arguments, layers=12, width=768, heads=12)
        else:
            form, model = Images(3, 224, 224, 1000), build(name)
    example = form.example(_SAMPLES, "meta")
    return profile(partition(model, n_stages, example), example)
