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
from toolkit.model.structure import Inputs, tensors_of
from toolkit.model.trace import evaluated, generator_states, kept_generators, refused, user_line

if TYPE_CHECKING:
    from toolkit.model.partition import Stages

_N_SAMPLES = 4  # two micro-batches of two, since a batch norm needs more than one
_MOST_FLOPS = {"cpu": 1e11}  # of a check with values drawn here: about 5 s of a laptop
_MOST_FLOPS_OF_GPU = 1e13
_TOLERANCE = {torch.float16: 5e-2, torch.bfloat16: 5e-2}  # relative to the largest value
_TINY = 1e-3  # parameters below, such as a last layer's zeros, would hide what comes before
_DROPOUTS: dict[Any, tuple[int, str]] = {  # position and name of the share that is dropped
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
    """Run two micro-batches apart and together, and compare what the model makes of them.

    Args:
        stages: the model; its parameters, buffers and modes stay as they are.
        example: as for :func:`partition`, with values of real samples; at most 4 are used. Nothing
            is compared if b is 1 or the model is on the meta device.

    Raises:
        UserError: a sample's output depends on the other samples; names the module and the line.
    """
    inputs = tensors_of(example)
    device = _device_of(stages, inputs)
    n = len(inputs[0])
    if n < 2 or device.type == "meta":
        return
    with refused(stages.model, inputs):
        place = _find_mixing(stages, _first_samples(inputs, device))
    _refuse(stages, place)


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
    runs = 2 * _N_SAMPLES * flops_of_sample
    if runs > _MOST_FLOPS.get(device.type, _MOST_FLOPS_OF_GPU):
        return
    drawn = all(x.is_floating_point() or x.is_complex() for x in inputs)
    if device.type != "cpu" and not drawn:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's own, about values that nobody gave it
            place = _find_mixing(stages, _drawn_samples(inputs, device))
    except Exception:  # the model's own code may raise anything on values that nobody gave it
        return
    _refuse(stages, place)


def _device_of(stages: "Stages", inputs: Inputs) -> torch.device:
    return next((p.device for p in stages.model.parameters()), inputs[0].device)


def _first_samples(inputs: Inputs, device: torch.device) -> Inputs:
    """Return the first samples of ``inputs``; the last one several times if they are too few."""
    # Repeated in this order, or two samples would make two equal micro-batches.
    rows = torch.arange(_N_SAMPLES).clamp(max=len(inputs[0]) - 1)
    return tuple(x[rows.to(x.device)].to(device) for x in inputs)


def _drawn_samples(inputs: Inputs, device: torch.device) -> Inputs:
    """Return samples like ``inputs``, with floating-point values from a generator of its own."""
    generator = torch.Generator("cpu").manual_seed(0)
    samples = []
    for first, x in zip(_first_samples(inputs, device), inputs, strict=True):
        if x.is_complex():
            values = torch.randn(first.shape, generator=generator, dtype=torch.complex64)
            samples.append(values.to(device, x.dtype))
        elif x.is_floating_point():
            values = torch.randn(first.shape, generator=generator, dtype=torch.float32)
            samples.append(values.to(device, x.dtype))
        else:
            samples.append(first)
    return tuple(samples)


@torch.no_grad()
def _find_mixing(stages: "Stages", inputs: Inputs) -> str | None:
    """Return where a model mixes the samples of ``inputs``; None if it does not."""
    exact = torch.autocast(inputs[0].device.type, enabled=False)  # half the digits would not do
    with kept_generators(inputs), exact:
        torch.default_generator.manual_seed(0)
        if _runs_agree(stages, inputs, None):
            return None
        places: list[str] = []
        _runs_agree(stages, inputs, places)
    return places[0] if places else " in its output"


def _refuse(stages: "Stages", place: str | None) -> None:
    """Raise UserError if the model mixes samples at ``place``."""
    if place is None:
        return
    raise UserError(
        f"{type(stages.model).__name__} mixes the samples of a batch{place}: its training would"
        " depend on which micro-batches run together. Compute each sample on its own, use"
        " torch.nn's batch norms, or move this into the loss, which takes one whole micro-batch"
    )


def _runs_agree(stages: "Stages", inputs: Inputs, places: list[str] | None) -> bool:
    """Whether outputs are the same apart and together; add to ``places`` where samples mix."""
    values = [*zip(*((x[:2], x[2:], x) for x in inputs), strict=True)]
    agree = True
    for stage, boundary in zip(stages, stages.boundaries, strict=True):
        if stage.meta["unbatched"]:
            # It runs micro-batches one by one, so it may mix samples. Earlier stages may not.
            received = zip(boundary, zip(*values, strict=True), strict=True)
            agree = agree and all(_alike(*x) for tensor, x in received if tensor.batched)
            values = _run_one_by_one(_probe(stage), values)
            continue
        lockstep = _Lockstep(_probe(stage), places)
        values = lockstep.run(values)
        agree = agree and lockstep.agree
    # A scalar is one of a micro-batch.
    by_sample = [k for k in range(len(stages.outputs)) if k not in stages.results.scalars]
    return agree and all(_agree(*(outputs[k] for outputs in values)) for k in by_sample)


def _run_one_by_one(stage: fx.GraphModule, values: Sequence[Inputs]) -> list[Inputs]:
    """Run on the inputs of each micro-batch; together, they have the outputs of both."""
    one, other = stage(*values[0]), stage(*values[1])
    both = tuple(map(torch.cat, zip(one, other, strict=True)))
    return [one, other, both]


class _Lockstep:
    """Runs a graph on one micro-batch, on another, and on both together, node by node.

    Places where samples mix are looked for, which takes longer, if there is a list for them.
    """

    def __init__(self, module: fx.GraphModule, places: list[str] | None) -> None:
        self.module, self.places = module, places
        self.runs = [fx.Interpreter(module, garbage_collect_values=False) for _ in range(3)]
        self.agree = True  # where random draws begin, whose results are made equal

    def run(self, values: Sequence[Inputs]) -> list[Inputs]:
        """Run on the inputs of the three; return the outputs of the three."""
        for run, inputs in zip(self.runs, values, strict=True):
            run.args_iter = iter(inputs)
        for node in self.module.graph.nodes:
            self._freeze_norm(node)
            before = generator_states()
            found = [run.run_node(node) for run in self.runs]
            if before != generator_states():
                self.agree = self.agree and all(map(self._alike, node.all_input_nodes))
                for one, other, both in zip(*map(tree_leaves, found), strict=True):
                    _join(one, other, both)
            for run, value in zip(self.runs, found, strict=True):
                run.env[node] = value
            if node.op == "output":
                return found
            if self.places is not None and not self._alike(node):
                self.places.append(_place(self._origin(node)))
        raise AssertionError("a graph ends in its output")

    def _alike(self, node: fx.Node) -> bool:
        """Whether a node's values are the same apart and together; memory may be undefined."""
        values = (tree_leaves(run.env[node]) for run in self.runs)
        return "empty" in str(node.target) or all(map(_alike, *values))

    def _freeze_norm(self, node: fx.Node) -> None:
        """Let a batch norm take the statistics of both micro-batches, and use them in each run."""
        if node.op != "call_module":
            return
        norm = self.module.get_submodule(str(node.target))
        if isinstance(norm, _BatchNorm) and node.target not in evaluated(self.module):
            if norm.running_mean is None:
                fresh = type(norm)(norm.num_features).to(self.runs[2].env[node.all_input_nodes[0]])
                vars(norm)["_buffers"] = vars(fresh)["_buffers"]
                norm.track_running_stats = True
            norm.momentum = 1.0
            norm.train()
            self.runs[2].run_node(node)
            norm.eval()

    def _origin(self, node: fx.Node) -> fx.Node:
        """Return the value without samples that ``node`` mixes in, such as a mean; or ``node``."""
        for source in node.all_input_nodes:
            one, _, both = (run.env[source] for run in self.runs)
            tensors = isinstance(one, Tensor) and isinstance(both, Tensor)
            if tensors and one.shape == both.shape and not _close(one, both):
                return self._origin(source)
        return node


def _probe(stage: fx.GraphModule) -> fx.GraphModule:
    """Copy ``stage``, with parameters that are shared, buffers of its own, and no dropout."""
    memo: dict[int, Any] = {}
    for parameter in stage.parameters():
        small = (
            parameter.is_floating_point() and parameter.numel() and parameter.abs().max() < _TINY
        )
        values = torch.randn_like(parameter) / 10 if small else parameter.data
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    probe = copy.deepcopy(stage, memo).eval()
    for node in probe.graph.nodes:
        place, name = _DROPOUTS.get(node.target, (None, ""))
        if name in node.kwargs:
            node.update_kwarg(name, 0.0)
        elif place is not None and len(node.args) > place:
            node.update_arg(place, 0.0)
        elif place is not None:
            node.kwargs = {**node.kwargs, name: 0.0}
    return probe


def _dimension(one: Tensor, other: Tensor, both: Tensor) -> int | None:
    """Return the dimension in which ``both`` is as long as the two together, if it is one."""
    shapes = (
        [*zip(one.shape, other.shape, both.shape, strict=True)]
        if (one.dim() == other.dim() == both.dim())
        else []
    )
    longer = [k for k, (a, b, c) in enumerate(shapes) if not a == b == c]
    fits = len(longer) == 1 and sum(shapes[longer[0]][:2]) == shapes[longer[0]][2]
    return longer[0] if fits else None


def _join(one: Any, other: Any, both: Any) -> None:
    """Make three results of the same random draw, or of the same statistics, equal."""
    if not all(isinstance(x, Tensor) for x in (one, other, both)):
        return
    if (dim := _dimension(one, other, both)) is not None:
        both.copy_(torch.cat([one, other], dim))
    elif one.shape == other.shape == both.shape:
        for tensor in (other, both):
            tensor.copy_(one)


def _agree(one: Any, other: Any, both: Any) -> bool:
    """Whether ``both`` is ``one`` followed by ``other`` in the first dimension."""
    return _dimension(one, other, both) == 0 and _close(torch.cat([one, other]), both)


def _alike(one: Any, other: Any, both: Any) -> bool:
    """Whether results have the same values; those of no fitting shape count as alike."""
    if not all(isinstance(x, Tensor) for x in (one, other, both)):
        return True
    if not both.is_floating_point() or (dim := _dimension(one, other, both)) is None:
        return True
    apart = torch.cat([one, other], dim)
    # The samples of micro-batches may alternate, as after a transpose and a reshape.
    return _close(apart, both) or _close(apart.flatten().sort()[0], both.flatten().sort()[0])


def _close(expected: Tensor, found: Tensor) -> bool:
    if not expected.numel():
        return True
    scale = expected.abs().nan_to_num(0, 0, 0).max()
    bound = float(scale) * _TOLERANCE.get(expected.dtype, 1e-3)
    return torch.allclose(found, expected, rtol=0, atol=bound, equal_nan=True)


def _place(node: fx.Node) -> str:
    """Describe where ``node`` comes from: the module, and the line of the user's code."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    where = ""
    if stack and (path := stack[-1][0]):
        where = f" in {path} ({getattr(stack[-1][1], '__name__', stack[-1][1])})"
    return where + user_line(node.stack_trace or "") or f" in {node}"
