"""What a rank finds out before the first message of micro-batches of a new shape."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from toolkit.model.generators import kept_generators
from toolkit.model.node_costs import meta_copy
from toolkit.runtime.boundary_codes import BoundaryCodes
from toolkit.runtime.losses import CheckedLoss
from toolkit.runtime.message_layout import Layout, Layouts
from toolkit.runtime.microbatches import BatchReader, Shape
from toolkit.runtime.process_group.world import World
from toolkit.runtime.rank_compression import RankCompressor
from toolkit.runtime.stage import StageRunner, Values
from toolkit.runtime.stage_layouts import find_layouts
from toolkit.runtime.warmup import warm_up, zeros

if TYPE_CHECKING:
    from toolkit.model.sharded_module import Sharding
    from toolkit.runtime.device_rows import DeviceRow


@dataclass(frozen=True)
class LossTrial:
    """A call of the loss on outputs of zeros, to see whether it returns a count.

    Attributes:
        loss: the loss.
        source: batches that this rank reads, with targets to try it on.
        n_microbatches: how many micro-batches this rank reads of the first batch.
    """

    loss: CheckedLoss
    source: BatchReader
    n_microbatches: int

    def is_counted(self, output: Layout, device: torch.device) -> bool:
        """Whether the loss returns a count; False where this rank reads nothing.

        Args:
            output: layout of what the last stage returns.
            device: where the loss is computed.
        """
        share = self.source.look()
        counted = False
        if share is not None:
            inputs, targets = share
            first_targets = targets.chunk(self.n_microbatches)[0]
            outputs = tuple(zeros(output, device).values())
            # An error is raised again where the loss belongs: at a forward of the last stage.
            with torch.no_grad(), kept_generators(inputs), suppress(Exception):
                counted = self.loss(outputs, first_targets).count is not None
        return counted


class RankLayouts:
    """The layouts of a rank's messages, found once for each shape of micro-batches.

    Args:
        world: the ranks.
        runners: all stages.
        wire: type in which gradients and weights travel; None: in their own.
        compressors: of the ranks in this process, by rank; empty: messages are no codes.
        boundary_codes: of activations and their gradients; None: they travel as they are.
        row: the stages on the devices of this rank, if it has several.
    """

    def __init__(
        self,
        world: World,
        runners: Sequence[StageRunner],
        wire: torch.dtype | None,
        compressors: Mapping[int, RankCompressor],
        boundary_codes: BoundaryCodes | None,
        row: "DeviceRow | None",
    ) -> None:
        self._world = world
        self._runners = runners
        self._wire = wire
        self._compressors = compressors
        self._boundary_codes = boundary_codes
        self._row = row
        if row is None:
            self._skeletons = [meta_copy(runner.compute) for runner in runners]
        else:
            self._skeletons = [stage.skeleton.module for stage in row.stages]
        self._layouts: dict[Shape, Layouts] = {}
        # If ranks have devices.
        self._shardings: dict[Shape, list[Sequence[Sharding | None]]] = {}

    @property
    def last_found(self) -> Layouts:
        """The layouts of the last new shape."""
        return next(reversed(self._layouts.values()))

    def find(
        self,
        shape: Shape | None,
        computed: Collection[int],
        updated: Collection[int],
        trial: LossTrial | None = None,
    ) -> Layouts:
        """Return the layouts for micro-batches of ``shape``. Every rank calls it.

        Args:
            shape: shape and type of each input; None on ranks that read no micro-batch.
            computed: stages whose ops this rank runs.
            updated: stages that it updates.
            trial: tries whether losses have counts; None: the caller knows.
        """
        # Ranks that read no micro-batch learn the shape from the others.
        shapes = self._world.gather(shape, "shapes of inputs")
        input_shape = next(shape for shape in shapes if shape is not None)
        if input_shape in self._layouts:
            if self._row is not None:
                self._row.use_shardings(self._shardings[input_shape])
            return self._layouts[input_shape]

        # 1. The layouts, by a run without memory.
        inputs = tuple(
            torch.empty(size, dtype=dtype, device="meta") for size, dtype in input_shape
        )
        layouts = self._by_run(inputs)

        # 2. Kernels, where loading them during a message could deadlock.
        device = self._world.device
        if self._world.backend == "nccl":
            self._world.watch.at("the first run of its stages")
            warm_up(self._runners, layouts, inputs, device, computed, updated)

        # 3. Counts. Receivers have to know of them before the first message. A loss that fails on
        #    zeros counts as a mean; if it is none, its first message is refused.
        if trial is not None:
            counted = trial.is_counted(layouts.activations[-1], device)
            if any(self._world.gather(counted, "kinds of loss")):
                layouts = layouts.with_counts()
        self._layouts[input_shape] = layouts
        if self._row is not None:
            self._shardings[input_shape] = self._row.shardings()
        return layouts

    def _by_run(self, inputs: Values) -> Layouts:
        device = self._world.device
        sharded_stages = self._row.stages if self._row is not None else ()
        with self._runners[0].options.autocast(device):
            layouts = find_layouts(
                self._skeletons, inputs, self._wire, device, sharded_stages
            )
        if self._row is not None:
            self._row.check_outputs(inputs, layouts.activations[-1])
        for compressor in self._compressors.values():
            layouts = layouts.with_compression(
                compressor.sums.code, compressor.weights.code
            )
        if self._boundary_codes is not None:
            layouts = self._boundary_codes.layouts(layouts)
        return layouts
