"""The explorer's controls: those of one schedule, and the costs and machines to choose from."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import ipywidgets as ui

from toolkit.cost import UNIT, Hardware, StageCost, profile, unit_costs
from toolkit.cost.hardware import presets
from toolkit.errors import UserError, first_line
from toolkit.figures.explorer import page
from toolkit.figures.explorer.choice import LARGEST, OWN, SCHEDULES, Choice, options_of
from toolkit.schedule import FRESHEST, PLACEMENTS, STATES

if TYPE_CHECKING:
    from torch import Tensor, nn

_EXAMPLE = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
_VALUES: dict[str, Sequence[Any]] = {
    "delay": (0, 1, 2, 3, FRESHEST), "placement": PLACEMENTS, "state": STATES,
}  # fmt: skip
_FIXED = {  # shown where a schedule leaves no choice
    "delay": "0",
    "placement": "per_stage",
    "state": "replicated",
    ("pipedream_2bw", "delay"): "1",
    ("published", "delay"): "by stage and worker",
    ("gradient_accumulation", "placement"): "one",
    (OWN, "placement"): "by the orders",
}

_UNSET = {"predict": False, "n_ranks": 2, "accumulate": 1}


def field(kind: Callable[..., Any], name: str, tip: str | None = None, **options: Any) -> Any:
    """A labelled control as wide as its place."""
    look = {"layout": {"width": "auto"}, "style": {"description_width": "96px"}}
    return kind(description=name, tooltip=tip, **look, **options)


def in_columns(*widgets: ui.Widget, least: str) -> ui.GridBox:
    """As many equal columns as there is room for."""
    columns = f"repeat(auto-fit, minmax({least}, 1fr))"
    return ui.GridBox(widgets, layout={"grid_template_columns": columns, "width": "100%"})


class Column:
    """Controls and figure of one schedule.

    Attributes:
        options: the controls of its options, by name.
        message: what is wrong, or nothing.
        figure: the schedule, as HTML.
        wanted: an op to look up, such as ``2F1``.
        found: what it waits for and frees.
        lines: the choice as a line of Python and as overrides.
    """

    def __init__(self, choice: Choice) -> None:
        count = partial(ui.BoundedIntText, min=1)
        text: dict[str, Any] = {"continuous_update": False}
        self.schedule = field(
            ui.Dropdown,
            "schedule",
            "a choice of conf/schedule, or rank orders of your own",
            options=SCHEDULES,
            value=choice.schedule,
        )
        self.delay = field(ui.Dropdown, "delay", "training steps by which weights are late")
        self.predict = field(
            ui.Checkbox, "predict", "extrapolate late weights to the step that reads them"
        )
        self.placement = field(ui.Dropdown, "placement", "the rank of each op")
        self.state = field(
            ui.Dropdown,
            "state",
            "whether parameters, gradients and optimizer state have one owner",
        )
        self.n_ranks = field(count, "ranks", max=64, value=2)
        self.accumulate = field(
            count,
            "accumulate",
            "micro-batches that each worker runs one after another in a step",
            max=LARGEST,
        )
        self.orders = field(
            ui.Textarea,
            "rank orders",
            "each rank's ops in order: stage, kind (F, B, I or W), micro-batch",
            value="\n".join(choice.orders) or _EXAMPLE,
            rows=4,
            **text,
        )
        self.wanted = field(ui.Text, "look up an op", placeholder="such as 2F1", **text)
        self.options = {
            name: getattr(self, name)
            for name in ("delay", "predict", "placement", "state", "n_ranks", "accumulate")
        }
        self.found, self.message, self.figure, self.lines = (ui.HTML() for _ in range(4))
        grid = in_columns(self.schedule, *self.options.values(), least="260px")
        self.box = ui.VBox(
            [grid, self.orders, self.message, self.figure, self.wanted, self.found, self.lines],
            layout={"flex": "1 1 0", "min_width": "0", "overflow": "hidden"},
        )
        self.box.add_class("cdp-column")
        self.offer(choice)

    def offer(self, choice: Choice) -> None:
        """Offer the options that the schedule takes, with the values of ``choice``."""
        usual = options_of(choice.schedule)
        for name, control in self.options.items():
            given = getattr(choice, name)
            value = usual.get(name) if given is None else given
            if name not in _VALUES:
                show(control, name in usual)
                control.value = value or _UNSET[name]
                continue
            control.disabled = name not in usual
            if control.disabled:
                control.options = [_FIXED.get((choice.schedule, name), _FIXED[name])]
            else:
                offered = dict.fromkeys((*_VALUES[name], value))
                control.options = [(str(v), v) for v in offered]
                control.value = value
        show(self.orders, choice.schedule == OWN)

    def choice(self, stages: int, microbatches: int) -> Choice:
        """What the controls say."""
        name = self.schedule.value
        options = {option: self.options[option].value for option in options_of(name)}
        if name == OWN:
            orders = tuple(line.strip() for line in self.orders.value.splitlines() if line.strip())
            return Choice(OWN, orders=orders, **options)
        return Choice(name, stages, microbatches, **options)

    def say(self, choice: Choice) -> None:
        """Show ``choice`` as lines to copy."""
        fields = {"Python": choice.python(), "overrides": choice.overrides()}
        self.lines.value = "".join(page.line(name, value) for name, value in fields.items())


def show(widget: ui.DOMWidget, visible: bool) -> None:
    """Show or hide ``widget``."""
    widget.layout.display = None if visible else "none"


UNIFORM = "uniform"
IMAGE_MODELS = ("resnet18", "resnet50", "vit_b_16")
_SAMPLES = 8  # of a micro-batch

Costs = Callable[[int], Sequence[StageCost]]
"""From the number of stages to what each costs."""


def hardware_presets() -> dict[str, Hardware]:
    """The unit machine and those of conf/hardware, by name; warns where that is missing."""
    try:
        return {"unit": UNIT} | presets()
    except ValueError as missing:
        warnings.warn(f"the explorer offers the unit machine alone: {missing}", stacklevel=2)
        return {"unit": UNIT}


def cost_sources() -> dict[str, Costs]:
    """Uniform stages, and the stages of models profiled on meta tensors, by name."""
    kinds = dict.fromkeys(IMAGE_MODELS, "images") | {"gpt2": "sequences"}
    models = {f"{name}, {_SAMPLES} {kind}": _preset(name) for name, kind in kinds.items()}
    return {UNIFORM: unit_costs, **models}


def profiled(model: "nn.Module", example: "Tensor | tuple[Tensor, ...] | None") -> Costs:
    """Costs of ``model``, which is cut and profiled when they are first needed.

    They raise a UserError if it cannot be traced, cut or run.
    """
    from toolkit.model import partition

    @cache
    def costs(n_stages: int) -> Sequence[StageCost]:
        if example is None:
            raise UserError("a model is profiled on an example: give a micro-batch, example=...")
        try:
            return profile(partition(model, n_stages, example), example)
        except ValueError:
            raise
        except Exception as error:  # the model's own code may raise anything
            who = type(model).__name__
            raise UserError(f"{who} cannot be profiled: {first_line(error)}") from error

    return costs


def _preset(name: str) -> Costs:
    """Costs of a model by name, made on the meta device when they are first needed."""

    @cache
    def made() -> Costs:
        import torch

        from toolkit.model import Images, InputSpec, Sequences, build, gpt

        form: InputSpec
        with torch.device("meta"):
            if name == "gpt2":
                form = Sequences(1024, 50257)
                model = gpt(**form.arguments, layers=12, width=768, heads=12)
            else:
                form, model = Images(3, 224, 224, 1000), build(name)
        return profiled(model, form.example(_SAMPLES, "meta"))

    return lambda n_stages: made()(n_stages)
