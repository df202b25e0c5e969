"""Memory of one micro-batch over its forward and backward, and of several in staggered order."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from toolkit.cost.hardware import Hardware, check_hardware
from toolkit.cost.stage_seconds import timed
from toolkit.errors import UserError, check_choice
from toolkit.model.generators import kept_generators
from toolkit.model.kernel_work import Work
from toolkit.model.node_costs import cut_off, node_costs
from toolkit.model.precision import check_precision
from toolkit.model.structure import tensors_of
from toolkit.model.trace import refused, trace
from toolkit.model.traced_stage import in_training

AXES = ("roofline", "flops", "bytes", "measured")
_REPEATS = 3  # counted runs of the measured axis


@dataclass(frozen=True)
class MemoryCurve:
    """Activation bytes of one micro-batch, constant between ``edges``.

    Attributes:
        edges: ``[k + 1]`` times from 0 to the period, in the axis's unit.
        levels: ``[k]`` bytes kept between consecutive edges.
    """

    edges: NDArray[np.float64]
    levels: NDArray[np.float64]

    @property
    def peak(self) -> float:
        """Most bytes kept at once."""
        return float(self.levels.max())

    @property
    def mean(self) -> float:
        """Mean bytes kept over the period."""
        return float(np.average(self.levels, weights=np.diff(self.edges)))

    @property
    def largest_reduction(self) -> float:
        """1 - mean/peak: the bound of :meth:`reduction` for many workers."""
        # Many staggered workers are spread over the period evenly: together they hold the mean of
        # each.
        return 1 - self.mean / self.peak

    def at(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes kept at ``times`` of the periodic curve, in the unit of ``edges``."""
        time_in_period = np.mod(times, self.edges[-1])
        # At an edge the level counts that begins there.
        segment = np.searchsorted(self.edges, time_in_period, side="right") - 1
        return self.levels[np.clip(segment, 0, len(self.levels) - 1)]

    def shifted(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the total of ``n`` workers, each 1/n of a period after the previous one.

        Returns:
            times within one period at which the total changes, and the total from each on.
        """
        period = self.edges[-1]
        shifts = np.arange(n) * period / n
        # The total changes only where some worker's curve does.
        times = np.unique(np.mod(self.edges[:-1, None] + shifts, period))
        rounding = 1e-9 * period  # rounding separates edges that coincide
        times = times[
            (np.diff(times, prepend=-period) > rounding) & (period - times > rounding)
        ]
        # The curve is evaluated between its edges, where rounding cannot choose the wrong side.
        middles = (times + np.append(times[1:], period)) / 2
        total = sum(
            (self.at(middles - shift) for shift in shifts), np.zeros_like(middles)
        )
        return times, total

    def reduction(self, n: int) -> float:
        """Return 1 - peak of ``n`` staggered workers / peak of ``n`` simultaneous ones."""
        return 1 - float(self.shifted(n)[1].max()) / (n * self.peak)


def memory_curve(
    model: nn.Module,
    example: Any,
    axis: str = "roofline",
    hardware: Hardware | None = None,
    precision: str = "fp32",
) -> MemoryCurve:
    """Return the activations kept by ``model`` over the time that its operations take.

    Args:
        model: any module that :func:`toolkit.model.partition` can trace.
        example: a micro-batch, as for it; only shapes matter unless ``axis`` is ``measured``.
        axis: time of an op: ``flops``, ``bytes``, the hardware's ``roofline``, or ``measured``
            on the device of ``example`` and ``model`` (random generators keep their state).
        hardware: for the roofline.
        precision: ``fp32`` or ``tf32``, or by autocast ``bf16`` or ``fp16``; autocast's copies of
            weights count as activations.

    Raises:
        UserError: unknown axis or precision, a roofline without hardware, or a model that cannot be
            traced, keeps no activations or takes no time on this axis.

    Source: arXiv 2403.08837, section 5, memory figure.
    """
    check_choice("axis", axis, AXES)
    check_precision(precision)
    inputs = tensors_of(example)
    traced = trace(model, example)
    with refused(model, inputs):
        costs = node_costs(traced, inputs, precision=precision)
    if axis == "measured":
        if inputs[0].device.type == "meta":
            raise UserError(
                "axis=measured runs the model: give an example on a real device"
            )
        with refused(model, inputs), kept_generators(inputs):
            forward, backward = _measured(traced, inputs, precision, costs)
    else:
        forward = [_duration(node.forward, axis, hardware) for node in costs.values()]
        backward = [_duration(node.backward, axis, hardware) for node in costs.values()]
    # What the nodes have kept rises during the forward, and falls in reverse in the backward:
    #
    #     bytes        ___
    #               __|   |__
    #            __|         |__
    #           |_______________|___ time
    #            forward  backward
    kept_bytes = np.cumsum([node.activations for node in costs.values()])
    durations = [*forward, *backward[::-1]]
    if any(durations):
        curve = _curve(durations, [*kept_bytes, *reversed(kept_bytes)])
        if curve.peak:
            return curve
    raise UserError(
        f"{type(model).__name__} keeps no activations over axis={axis}: choose another axis or"
        " add a layer"
    )


def _curve(durations: Sequence[float], levels: Sequence[float]) -> MemoryCurve:
    """Return the curve of ``levels`` that last for ``durations``, without those of no time."""
    has_duration = np.array(durations) > 0
    edges = np.concatenate([[0.0], np.cumsum(np.array(durations)[has_duration])])
    return MemoryCurve(edges, np.array(levels, dtype=float)[has_duration])


def _duration(work: Work, axis: str, hardware: Hardware | None) -> float:
    """Return the time of a node's work in the unit of ``axis``."""
    if axis == "roofline":
        return check_hardware(hardware).roofline(work)
    return float(getattr(work, axis))


def _measured(
    traced: fx.GraphModule,
    inputs: tuple[Tensor, ...],
    precision: str,
    names: Iterable[str],
) -> NDArray[np.float64]:
    """Return median seconds on the device of ``inputs``: ``[2 (forward, backward), nodes]``."""
    runs = []
    for _ in range(1 + _REPEATS):
        stopwatch = _Stopwatch(
            in_training(copy.deepcopy(traced)), inputs[0].device, precision
        )
        stopwatch.run(*inputs)
        runs.append([stopwatch.seconds[name] for name in names])
    return np.median(runs[1:], axis=0).T  # the first run warms up


class _Stopwatch(fx.Interpreter):
    """Time each node, forward and backward, on inputs detached from earlier nodes."""

    def __init__(
        self, traced: fx.GraphModule, device: torch.device, precision: str
    ) -> None:
        super().__init__(traced, garbage_collect_values=True)
        self.device = device
        self.precision = precision
        self.seconds: dict[str, tuple[float, float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        # Each node has its own graph, so that its backward contains no other node's.
        (args, kwargs), _ = cut_off((args, kwargs), changed=True)
        run = partial(getattr(self, n.op), n.target, args, kwargs)
        forward, backward, output = timed(run, self.device, self.precision)
        self.seconds[n.name] = forward, backward
        return output
