"""The optimizers of stages, made from one finished optimizer of the whole model."""

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.runtime.make_optimizer import by_name

GroupOptions = dict[str, Any]
"""The options of a parameter group, without its parameters."""

_COUPLING_STEPS = 10  # Prodigy's first steps are the same, whatever the parameters
# Entries of a group that list its parameters.
_PARAMETER_KEYS = ("params", "param_names")
# Attributes that learning-rate schedulers set.
_SCHEDULER_KEYS = ("step", "_opt_called")


def options_of_group(group: Mapping[str, Any]) -> GroupOptions:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in _PARAMETER_KEYS}


class StageOptimizers:
    """Makes optimizers of stages that continue a finished optimizer of the whole model.

    A stage's optimizer has the same groups in the same order, with the stage's parameters only; a
    group may be empty.

    Args:
        optimizer: the finished optimizer.
        model: the model that it trains.

    Raises:
        UserError: it has parameters that are not the model's, or hooks.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UserError(
                f"optimizer: got a {type(optimizer).__name__}; expected a torch optimizer, or a"
                " function from a list of parameters to one"
            )
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if getattr(optimizer, hooks, None):
                raise UserError(
                    f"{type(optimizer).__name__} has a hook on its step, which stages would call at"
                    " different times: remove it, and act after optimizer.step()"
                )
        self.optimizer = optimizer
        self._names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # A tied weight has its first name here; its other names are aliases.
            self._names.setdefault(id(parameter), name)
        self._aliases = {
            name: self._names[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.groups = [
            self._names_of(group["params"]) for group in optimizer.param_groups
        ]
        self.note_options()

    def note_options(self) -> None:
        """Copy the finished optimizer's present options, with which :meth:`make` begins."""
        groups = self.optimizer.param_groups
        self._options = [copy.deepcopy(options_of_group(group)) for group in groups]

    def _names_of(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        foreign_parameters = [
            parameter for parameter in parameters if id(parameter) not in self._names
        ]
        if foreign_parameters:
            raise UserError(
                f"optimizer: got a parameter of shape {list(foreign_parameters[0].shape)} that the"
                " model does not have; expected the model's own. Make the optimizer after the"
                " model is moved or changed"
            )
        return [self._names[id(parameter)] for parameter in parameters]

    @by_name
    def make(self, pairs: list[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return the optimizer of a stage with these names and parameters."""
        original = self.optimizer
        parameters = {self._aliases[name]: parameter for name, parameter in pairs}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        param_groups = []
        for group, names, noted_options in zip(
            original.param_groups, self.groups, self._options, strict=True
        ):
            stage_names = [name for name in names if name in parameters]
            options = copy.deepcopy(noted_options)
            if "param_names" in group:
                options["param_names"] = stage_names
            param_groups.append(
                {**options, "params": [parameters[name] for name in stage_names]}
            )
            for name, parameter in zip(names, group["params"], strict=True):
                if name in parameters and parameter in original.state:
                    state[parameters[name]] = copy.deepcopy(original.state[parameter])
        # Not made anew: its class may take arguments that no attribute shows.
        twin = copy.copy(original)
        _copy_attributes(original, twin)
        twin.param_groups = param_groups
        twin.state = state
        _train_mode(twin)
        return twin

    @property
    def averages(self) -> bool:
        """Whether the optimizer evaluates with other weights than it trains."""
        return callable(getattr(self.optimizer, "eval", None))

    def couples(self) -> bool:
        """Whether a parameter's update depends on other parameters, as Prodigy's does.

        Two small parameters are updated together and apart. An optimizer that cannot update these
        counts as one that does not couple.
        """
        try:
            return _couples(self)
        except Exception:  # it may expect shapes, names or closures that are not there
            return False

    def state(self) -> dict[str, Any]:
        """Return a copy of the state of each parameter that the finished optimizer has."""
        parameter_states = {}
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                if self.optimizer.state.get(parameter):
                    parameter_states[name] = on_cpu(self.optimizer.state[parameter])
        return parameter_states

    def adopt(
        self, of_parameters: Mapping[str, Any], options: Mapping[str, GroupOptions]
    ) -> None:
        """Load a state into the finished optimizer; stage optimizers made later begin with it.

        Args:
            of_parameters: state of each parameter, by name.
            options: options of the group of each parameter, by name.
        """
        state = self.as_torch(of_parameters)
        for group, names in zip(state["param_groups"], self.groups, strict=True):
            if names:
                group.update(options[names[0]])
        # torch's own, which also moves the state to each parameter's device and type.
        Optimizer.load_state_dict(self.optimizer, state)

    def order(self, names: Collection[str]) -> list[list[str]]:
        """Return the names of a stage's parameters in each group, as its optimizer has them."""
        of_stage = {self._aliases[name] for name in names}
        order = []
        for group in self.groups:
            order.append([name for name in group if name in of_stage])
        return order

    # State by the names of parameters, whatever the stages.

    def named(
        self, names: Collection[str], state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, GroupOptions]]:
        """Return the state and the group options of each parameter, by name.

        Args:
            names: those of the stage's parameters.
            state: state_dict of the stage's optimizer, which numbers parameters.
        """
        order = self.order(names)
        # torch numbers the parameters of an optimizer through its groups, in order.
        flat_names = [*chain.from_iterable(order)]
        parameter_states = {
            flat_names[index]: values for index, values in state["state"].items()
        }
        options: dict[str, GroupOptions] = {}
        for group, group_names in zip(state["param_groups"], order, strict=True):
            options |= dict.fromkeys(group_names, options_of_group(group))
        return parameter_states, options

    def state_of_stage(
        self,
        names: Collection[str],
        of_parameters: Mapping[str, Any],
        options: Mapping[str, GroupOptions],
    ) -> dict[str, Any]:
        """Return the state_dict of the optimizer of a stage with these ``names``."""
        state: dict[int, Any] = {}
        param_groups = []
        index = 0
        for group, group_names in zip(
            self.optimizer.param_groups, self.order(names), strict=True
        ):
            first_index = index
            for name in group_names:
                if name in of_parameters:
                    state[index] = of_parameters[name]
                index += 1
            group_options = options_of_group(group)
            # Parameters of a group share its options, so those of the first are taken.
            for name in group_names[:1]:
                # Schedulers add entries of their own, which another run may not have.
                named_options = options.get(name, {})
                group_options |= {
                    key: value
                    for key, value in named_options.items()
                    if key in group_options
                }
            if "param_names" in group:
                group_options["param_names"] = group_names
            param_groups.append(
                {**group_options, "params": [*range(first_index, index)]}
            )
        return {"state": state, "param_groups": param_groups}

    def as_torch(self, of_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state_dict that the whole optimizer would have under torch's own DDP."""
        flat_names = [*chain.from_iterable(self.groups)]
        state = {
            position: of_parameters[name]
            for position, name in enumerate(flat_names)
            if name in of_parameters
        }
        param_groups = []
        index = 0
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            indices = [*range(index, index + len(names))]
            index += len(names)
            param_groups.append({**options_of_group(group), "params": indices})
        return {"state": state, "param_groups": param_groups}

    def from_torch(
        self, state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, GroupOptions]]:
        """Return the state and the group options of each parameter, by name.

        Args:
            state: state_dict of the whole optimizer, as :meth:`as_torch` returns it.

        Raises:
            UserError: its groups have other numbers of parameters.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        expected = [len(names) for names in self.groups]
        if sizes != expected:
            raise UserError(
                f"optimizer state: got groups of {sizes} parameters; expected {expected}. Load it"
                " into an optimizer with the groups that it was saved with"
            )
        parameter_states: dict[str, Any] = {}
        options: dict[str, GroupOptions] = {}
        for group, names in zip(state["param_groups"], self.groups, strict=True):
            for place, name in zip(group["params"], names, strict=True):
                options[name] = options_of_group(group)
                if place in state["state"]:
                    parameter_states[name] = state["state"][place]
        return parameter_states, options


def _couples(stage_optimizers: StageOptimizers) -> bool:
    """Whether two parameters end elsewhere if they are updated together than if apart."""
    original = stage_optimizers.optimizer
    options = options_of_group(original.param_groups[0])
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 2, 2, dtype=torch.float64, generator=generator)

    def updated(chosen: Sequence[int]) -> list[Tensor]:
        parameters = [nn.Parameter(values[k].clone()) for k in chosen]
        twin = copy.copy(original)
        _copy_attributes(original, twin)
        twin.param_groups = [{**copy.deepcopy(options), "params": parameters}]
        twin.state = defaultdict(dict)
        _train_mode(twin)
        for _ in range(_COUPLING_STEPS):
            for parameter in parameters:
                parameter.grad = parameter.detach().clone()  # of a quadratic loss
            twin.step()
        return [parameter.detach() for parameter in parameters]

    first, second = updated([0, 1])
    (first_alone,) = updated([0])
    (second_alone,) = updated([1])
    # To the bit, in float64: an update that looks at one parameter alone makes no difference at
    # all.
    return not (torch.equal(first, first_alone) and torch.equal(second, second_alone))


def _copy_attributes(original: Optimizer, twin: Optimizer) -> None:
    """Add what ``copy.copy`` of an optimizer leaves out: torch copies only groups and state."""
    for name, value in vars(original).items():
        if name not in vars(twin) and name not in _SCHEDULER_KEYS:
            vars(twin)[name] = value


def _train_mode(optimizer: Optimizer) -> None:
    """Switch an optimizer to training, if it has modes, as schedule-free ones have."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def on_cpu(tree: Any) -> Any:
    """Return nested values with copies of their tensors in the CPU's memory."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree
    )
