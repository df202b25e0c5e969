"""Find models that mix the samples of a batch.

Which micro-batches run as one batch depends on the runtime and the order of a schedule. A model
whose output for a sample depends on other samples, as ``x - x.mean(0)`` does, would train
differently in each. Batch norms are exempt: they always separate micro-batches.
"""

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from toolkit.errors import UserError
from toolkit.model.generators import generator_states, kept_generators
from toolkit.model.structure import Inputs, tensors_of
from toolkit.model.trace import refused, user_line
from toolkit.model.traced_stage import evaluated

if TYPE_CHECKING:
    from toolkit.model.partition import Stages

_N_SAMPLES = 4  # two micro-batches of two, since a batch norm needs more than one
_MOST_FLOPS = {"cpu": 1e11}  # of a check with values drawn here: about 5 s of a laptop
_MOST_FLOPS_OF_GPU = 1e13
# Relative to the largest value.
_TOLERANCE = {torch.float16: 5e-2, torch.bfloat16: 5e-2}
# Parameters below, such as a last layer's zeros, would hide what comes before.
_TINY = 1e-3
# Position and name of the share that is dropped.
_DROPOUTS: dict[Any, tuple[int, str]] = {
    F.dropout: (1, "p"),
    F.alpha_dropout: (1, "p"),
    F.feature_alpha_dropout: (1, "p"),
    F.dropout1d: (1, "p"),
    F.dropout2d: (1, "p"),
    F.dropout3d: (1, "p"),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    torch.dropout: (1, "p"),
    torch.ops.aten.dropout.default: (1, "p"),
    torch.ops.aten.scaled_dot_product_attention.default: (4, "dropout_p"),
}


def check_independent(stages: "Stages", example: Any) -> None:
    """Run two micro-batches apart and together, and compare the model's outputs.

    Args:
        stages: the model; its parameters, buffers and modes stay as they are.
        example: as for :func:`partition`, with values of real samples; at most 4 are used. Nothing
            is compared if b is 1 or the model is on the meta device.

    Raises:
        UserError: a sample's output depends on the other samples; names the module and the line.
    """
    inputs = tensors_of(example)
    device = _device_of(stages, inputs)
    n_samples = len(inputs[0])
    if n_samples < 2 or device.type == "meta":
        return
    with refused(stages.model, inputs):
        mixing_place = _find_mixing(stages, _first_samples(inputs, device))
    _refuse(stages, mixing_place)


def check_partition(stages: "Stages", example: Any, flops_of_sample: float) -> None:
    """Check as :func:`check_independent`, with values that are drawn here.

    Floating-point inputs are drawn from a normal distribution. Whole numbers are those of the
    example, since only some have a meaning to the model.

    It does not judge a model that fails on such values, is on the meta device, or takes long. On a
    GPU it needs an example without whole numbers: one out of range would end the GPU's work.

    Args:
        stages: the model; its parameters, buffers and modes stay as they are.
        example: as for :func:`partition`; only shapes and types need to be meaningful.
        flops_of_sample: floating-point operations of the model's forward for one sample.

    Raises:
        UserError: a sample's output depends on the other samples; names the module and the line.
    """
    inputs = tensors_of(example)
    device = _device_of(stages, inputs)
    if device.type == "meta" or any(tensor.is_meta for tensor in inputs):
        return
    # Each sample runs twice: in its micro-batch, and in both together.
    flops_of_runs = 2 * _N_SAMPLES * flops_of_sample
    if flops_of_runs > _MOST_FLOPS.get(device.type, _MOST_FLOPS_OF_GPU):
        return
    can_be_drawn = all(
        tensor.is_floating_point() or tensor.is_complex() for tensor in inputs
    )
    if device.type != "cpu" and not can_be_drawn:
        return
    try:
        with warnings.catch_warnings():
            # The model's own, about values that nobody gave it.
            warnings.simplefilter("ignore")
            mixing_place = _find_mixing(stages, _drawn_samples(inputs, device))
    except Exception:
        # The model's own code may raise anything on values that nobody gave it.
        return
    _refuse(stages, mixing_place)


def _device_of(stages: "Stages", inputs: Inputs) -> torch.device:
    """Return the device of the model, or of the inputs if it has no parameters."""
    return next(
        (parameter.device for parameter in stages.model.parameters()), inputs[0].device
    )


def _first_samples(inputs: Inputs, device: torch.device) -> Inputs:
    """Return the first samples of ``inputs``; the last one several times if they are too few."""
    # Repeated in this order, or two samples would make two equal micro-batches.
    rows = torch.arange(_N_SAMPLES).clamp(max=len(inputs[0]) - 1)
    return tuple(tensor[rows.to(tensor.device)].to(device) for tensor in inputs)


def _drawn_samples(inputs: Inputs, device: torch.device) -> Inputs:
    """Return samples like ``inputs``, with floating-point values from a generator of its own."""
    generator = torch.Generator("cpu").manual_seed(0)
    samples = []
    for first_samples, tensor in zip(
        _first_samples(inputs, device), inputs, strict=True
    ):
        if tensor.is_complex():
            values = torch.randn(
                first_samples.shape, generator=generator, dtype=torch.complex64
            )
            samples.append(values.to(device, tensor.dtype))
        elif tensor.is_floating_point():
            values = torch.randn(
                first_samples.shape, generator=generator, dtype=torch.float32
            )
            samples.append(values.to(device, tensor.dtype))
        else:
            samples.append(first_samples)
    return tuple(samples)


@torch.no_grad()
def _find_mixing(stages: "Stages", inputs: Inputs) -> str | None:
    """Return where a model mixes the samples of ``inputs``; None if it does not."""
    # Half the digits would not do.
    without_autocast = torch.autocast(inputs[0].device.type, enabled=False)
    with kept_generators(inputs), without_autocast:
        torch.default_generator.manual_seed(0)
        if _runs_agree(stages, inputs, None):
            return None
        places: list[str] = []
        _runs_agree(stages, inputs, places)
    return places[0] if places else " in its output"


def _refuse(stages: "Stages", mixing_place: str | None) -> None:
    """Raise UserError if the model mixes samples at ``place``."""
    if mixing_place is None:
        return
    raise UserError(
        f"{type(stages.model).__name__} mixes the samples of a batch{mixing_place}: its training"
        " would depend on which micro-batches run together. Compute each sample on its own, use"
        " torch.nn's batch norms, or move this into the loss, which takes one whole micro-batch"
    )


def _runs_agree(stages: "Stages", inputs: Inputs, places: list[str] | None) -> bool:
    """Return whether outputs are the same apart and together; add to ``places`` where they mix."""
    first_inputs = tuple(tensor[:2] for tensor in inputs)
    second_inputs = tuple(tensor[2:] for tensor in inputs)
    # The same samples in two ways::
    #
    #     apart      first [0 1]   second [2 3]
    #     together   joint [0 1 2 3]
    values: Sequence[Inputs] = [first_inputs, second_inputs, inputs]
    agree = True
    for stage, boundary in zip(stages, stages.boundaries, strict=True):
        if stage.meta["unbatched"]:
            # It runs micro-batches one by one, so it may mix samples. Earlier stages may not.
            for tensor, results in zip(
                boundary, zip(*values, strict=True), strict=True
            ):
                if agree and tensor.batched:
                    agree = _alike(*results)
            values = _run_one_by_one(_probe(stage), values)
            continue
        lockstep = _Lockstep(_probe(stage), places)
        values = lockstep.run(values)
        agree = agree and lockstep.agree
    # A scalar is one of a micro-batch.
    for index in range(len(stages.outputs)):
        if agree and index not in stages.results.scalars:
            first, second, joint = (outputs[index] for outputs in values)
            agree = _agree(first, second, joint)
    return agree


def _run_one_by_one(stage: fx.GraphModule, values: Sequence[Inputs]) -> list[Inputs]:
    """Run on the inputs of each micro-batch; together, they have the outputs of both."""
    first_outputs = stage(*values[0])
    second_outputs = stage(*values[1])
    joint_outputs = tuple(
        map(torch.cat, zip(first_outputs, second_outputs, strict=True))
    )
    return [first_outputs, second_outputs, joint_outputs]


class _Lockstep:
    """Runs a graph on one micro-batch, on another, and on both together, node by node.

    Places where samples mix are looked for, which takes longer, if there is a list for them.
    """

    def __init__(self, module: fx.GraphModule, places: list[str] | None) -> None:
        self.module = module
        self.places = places
        self.runs = [
            fx.Interpreter(module, garbage_collect_values=False) for _ in range(3)
        ]
        self.agree = True  # where random draws begin, whose results are made equal

    def run(self, values: Sequence[Inputs]) -> list[Inputs]:
        """Run on the inputs of the three; return the outputs of the three."""
        for run, inputs in zip(self.runs, values, strict=True):
            run.args_iter = iter(inputs)
        for node in self.module.graph.nodes:
            self._freeze_norm(node)
            # A node that draws at random is known by the generators that it advances.
            earlier_states = generator_states()
            results = [run.run_node(node) for run in self.runs]
            if earlier_states != generator_states():
                # Each run has drawn other numbers: equal ones let later nodes be compared.
                self.agree = self.agree and all(map(self._alike, node.all_input_nodes))
                for first, second, joint in zip(
                    *map(tree_leaves, results), strict=True
                ):
                    _join(first, second, joint)
            for run, value in zip(self.runs, results, strict=True):
                run.env[node] = value
            if node.op == "output":
                return results
            if self.places is not None and not self._alike(node):
                self.places.append(_place(self._origin(node)))
        raise AssertionError("a graph ends in its output")

    def _alike(self, node: fx.Node) -> bool:
        """Return whether a node's values are the same apart and together.

        New memory, such as that of torch.empty, may have any values.
        """
        values = (tree_leaves(run.env[node]) for run in self.runs)
        return "empty" in str(node.target) or all(map(_alike, *values))

    def _freeze_norm(self, node: fx.Node) -> None:
        """Let a batch norm take the statistics of both micro-batches, and use them in each run."""
        if node.op != "call_module":
            return
        norm = self.module.get_submodule(str(node.target))
        if not isinstance(norm, _BatchNorm) or node.target in evaluated(self.module):
            return
        if norm.running_mean is None:
            joint_input = self.runs[2].env[node.all_input_nodes[0]]
            new_norm = type(norm)(norm.num_features).to(joint_input)
            vars(norm)["_buffers"] = vars(new_norm)["_buffers"]
            norm.track_running_stats = True
        # A norm's own statistics differ between micro-batches by design, and are no mixing.
        norm.momentum = 1.0  # running statistics are those of this batch
        norm.train()
        self.runs[2].run_node(node)
        norm.eval()

    def _origin(self, node: fx.Node) -> fx.Node:
        """Return the value without samples that ``node`` mixes in, such as a mean; or ``node``."""
        for source in node.all_input_nodes:
            first, _, joint = (run.env[source] for run in self.runs)
            are_tensors = isinstance(first, Tensor) and isinstance(joint, Tensor)
            if are_tensors and first.shape == joint.shape and not _close(first, joint):
                return self._origin(source)
        return node


def _probe(stage: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``stage`` without dropout, which shares parameters and copies buffers."""
    copy_of_tensor: dict[int, Any] = {}
    for parameter in stage.parameters():
        values = parameter.data
        if values.is_floating_point() and values.numel() and values.abs().max() < _TINY:
            values = torch.randn_like(parameter) / 10
        copy_of_tensor[id(parameter)] = nn.Parameter(values, requires_grad=False)
    probe = copy.deepcopy(stage, copy_of_tensor).eval()
    for node in probe.graph.nodes:
        position, name = _DROPOUTS.get(node.target, (None, ""))
        if name in node.kwargs:
            node.update_kwarg(name, 0.0)
        elif position is not None and len(node.args) > position:
            node.update_arg(position, 0.0)
        elif position is not None:
            node.kwargs = {**node.kwargs, name: 0.0}
    return probe


def _dimension(first: Tensor, second: Tensor, joint: Tensor) -> int | None:
    """Return the one dimension in which ``joint`` is as long as the other two together, or None."""
    if not first.dim() == second.dim() == joint.dim():
        return None
    differing_dimensions = []
    for dimension in range(joint.dim()):
        sizes = {
            first.shape[dimension],
            second.shape[dimension],
            joint.shape[dimension],
        }
        if len(sizes) > 1:
            differing_dimensions.append(dimension)
    if len(differing_dimensions) != 1:
        return None
    (dimension,) = differing_dimensions
    is_joined = (
        first.shape[dimension] + second.shape[dimension] == joint.shape[dimension]
    )
    return dimension if is_joined else None


def _join(first: Any, second: Any, joint: Any) -> None:
    """Make three results of the same random draw, or of the same statistics, equal."""
    if not all(isinstance(result, Tensor) for result in (first, second, joint)):
        return
    dimension = _dimension(first, second, joint)
    if dimension is not None:
        joint.copy_(torch.cat([first, second], dimension))
    elif first.shape == second.shape == joint.shape:
        for tensor in (second, joint):
            tensor.copy_(first)


def _agree(first: Any, second: Any, joint: Any) -> bool:
    """Return whether ``joint`` is ``first`` followed by ``second`` in the first dimension."""
    return _dimension(first, second, joint) == 0 and _close(
        torch.cat([first, second]), joint
    )


def _alike(first: Any, second: Any, joint: Any) -> bool:
    """Return whether results have the same values; True if their shapes cannot be compared."""
    if not all(isinstance(result, Tensor) for result in (first, second, joint)):
        return True
    dimension = _dimension(first, second, joint)
    if not joint.is_floating_point() or dimension is None:
        return True
    separate = torch.cat([first, second], dimension)
    if _close(separate, joint):
        return True
    # The samples of micro-batches may alternate, as after a transpose and a reshape.
    return _close(separate.flatten().sort()[0], joint.flatten().sort()[0])


def _close(expected: Tensor, actual: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the largest value."""
    if not expected.numel():
        return True
    scale = expected.abs().nan_to_num(0, 0, 0).max()
    bound = float(scale) * _TOLERANCE.get(expected.dtype, 1e-3)
    return torch.allclose(actual, expected, rtol=0, atol=bound, equal_nan=True)


def _place(node: fx.Node) -> str:
    """Describe where ``node`` comes from: the module, and the line of the user's code."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    module_text = ""
    if stack:
        path, kind = stack[-1]  # of the innermost module
        if path:
            module_text = f" in {path} ({getattr(kind, '__name__', kind)})"
    return module_text + user_line(node.stack_trace or "") or f" in {node}"
