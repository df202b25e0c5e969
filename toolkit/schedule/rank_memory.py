"""What a rank holds while its program is verified, and what it refuses to do without."""

from toolkit.schedule.instruction import PREDICTION, Buffer, Instruction, WeightsKey

_OpKey = tuple[int, int | None, int | None]  # stage, micro-batch, step
# And what crosses the boundary.
_BoundaryKey = tuple[Buffer, int, int | None, int | None]
_SumKey = tuple[int, int | None]  # stage, step


class RefusedError(Exception):
    """Why an instruction cannot be carried out."""


class RankMemory:
    """What one rank holds.

    Attributes:
        activations: what forwards keep for their backwards.
        boundaries: outputs and gradients of inputs that the next op of a micro-batch reads.
        halves: backwards whose first half is done and whose second is not.
        sums: of gradients, as the set of their micro-batches: bit m is micro-batch m.
        weights: versions and predictions.
    """

    def __init__(self) -> None:
        self.activations: set[_OpKey] = set()
        self.boundaries: set[_BoundaryKey] = set()
        self.halves: set[_OpKey] = set()
        self.sums: dict[_SumKey, int] = {}
        self.weights: set[WeightsKey] = set()

    def read_weights(self, weights: WeightsKey) -> None:
        """Refuse to read weights that are not there."""
        if weights not in self.weights:
            stage, version, *prediction_step = weights
            name = f"version {version}"
            if prediction_step:
                name = f"the prediction from {name}"
            raise RefusedError(f"the rank does not hold {name} of stage {stage}")

    def add_weights(self, i: Instruction) -> None:
        """Add a version or a prediction, once."""
        if i.weights in self.weights:
            kind = "prediction" if i.buffer == PREDICTION else "version"
            raise RefusedError(f"the rank holds that {kind} already")
        self.weights.add(i.weights)

    def add_to_sum(self, key: _SumKey, microbatches: int) -> None:
        """Add the gradients of micro-batches that are not in the sum yet."""
        # Bit m is micro-batch m: sums merge by `|`, and a common bit is a gradient that counts
        # twice.
        summed = self.sums.get(key, 0)
        if summed & microbatches:
            raise RefusedError("a micro-batch's gradient is counted twice")
        self.sums[key] = summed | microbatches

    def take_boundary(self, key: _BoundaryKey) -> None:
        """Remove what crosses a boundary; refuse if it is not there."""
        if key not in self.boundaries:
            buffer, stage, microbatch, _ = key
            raise RefusedError(
                f"the {buffer.label} of stage {stage}, micro-batch {microbatch} is not there"
            )
        self.boundaries.remove(key)
