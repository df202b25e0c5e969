"""Rates of large trainings that papers publish, simulated from facts that they print.

A device of a rank runs the matrix products of its share of some layers. They take a stated share of
the device's rate. Collectives of the rank's devices follow them, as in
:mod:`toolkit.cost.tensor_width`. Pipelines are simulated; sums over workers come after the step, in
full. Nothing is fitted to the published rates.
"""

from dataclasses import dataclass
from typing import Any

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import StageCost
from toolkit.cost.tensor_width import Width
from toolkit.model.kernel_work import Work
from toolkit.model.sharded_work import Exchange
from toolkit.schedule import Schedule, ScheduleSpec

_HALF = 2  # bytes of a number of 16 bits
_ADAM_BYTES = 12  # of a parameter: a copy of the weight and two means, in 32 bits
RATE = "TFLOP/s a device"


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer.

    Attributes:
        layers: blocks of attention and a perceptron.
        hidden: numbers that stand for a token.
        heads: of attention.
        sequence: tokens.
        vocabulary: tokens that there are.
        feed_forward: hidden units of the perceptron; None: 4 times ``hidden``.
        key_value_heads: heads of keys and values; None: ``heads``.
        gated: whether the perceptron has a third product, as SwiGLU has.
        keeps_scores: whether attention's scores are written to memory, as before FlashAttention.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    feed_forward: int | None = None
    key_value_heads: int | None = None
    gated: bool = False
    keeps_scores: bool = False

    @property
    def _wide(self) -> int:
        return self.feed_forward or 4 * self.hidden

    @property
    def _query_key_value(self) -> int:
        """Numbers of queries, keys and values of a token."""
        shared_heads = self.key_value_heads or self.heads
        return self.hidden + 2 * self.hidden * shared_heads // self.heads

    @property
    def layer_weights(self) -> int:
        """Parameters of a block's matrices."""
        n_wide_matrices = 3 if self.gated else 2
        attention_weights = self.hidden * (self._query_key_value + self.hidden)
        return attention_weights + n_wide_matrices * self.hidden * self._wide

    @property
    def token_flops(self) -> int:
        """Forward operations of a block on a token, with all scores of attention."""
        return 2 * self.layer_weights + 4 * self.sequence * self.hidden

    def kernels(
        self, n_samples: int, width: int, shares_tokens: bool
    ) -> tuple[Work, ...]:
        """Return the kernels of a block's forward on one of ``width`` devices.

        Args:
            n_samples: of a micro-batch.
            width: devices that share the block.
            shares_tokens: whether each does norms and sums of its tokens only.
        """
        n_tokens = n_samples * self.sequence
        n_numbers = n_tokens * self.hidden
        products = [
            _product(n_tokens, self.hidden, self._query_key_value // width),
            _product(n_tokens, self.hidden // width, self.hidden),
            _product(
                n_tokens, self.hidden, (2 if self.gated else 1) * self._wide // width
            ),
            _product(n_tokens, self._wide // width, self.hidden),
        ]
        # Queries times keys, and their softmax times values: two products of 2 operations an entry.
        # Memory traffic is that of queries, keys, values and the result.
        score_flops = 4 * n_tokens * self.sequence * self.hidden // width
        score_bytes = 4 * n_numbers * _HALF // width
        if self.keeps_scores:
            # Written, read and written by the softmax and by the dropout, and read.
            score_bytes += (
                6 * n_samples * self.heads // width * self.sequence**2 * _HALF
            )
        else:
            # FlashAttention leaves out the half of the scores that causality does.
            score_flops //= 2
        # Two norms read and write; two sums with dropout read two tensors and write one.
        between_bytes = (2 * 2 + 2 * 3) * n_numbers * _HALF
        if shares_tokens:
            between_bytes //= width
        activation_bytes = (
            (3 if self.gated else 2) * n_tokens * self._wide // width * _HALF
        )
        return (
            *products,
            Work(score_flops, score_bytes, in_16_bits=True),
            Work(0, between_bytes + activation_bytes, in_16_bits=True),
        )


def _product(n_rows: int, n_inner: int, n_columns: int) -> Work:
    """Return the work of a matrix product."""
    n_numbers = n_rows * n_inner + n_inner * n_columns + n_rows * n_columns
    return Work(2 * n_rows * n_inner * n_columns, n_numbers * _HALF, in_16_bits=True)


@dataclass(frozen=True)
class Cluster:
    """Machines of a published training.

    Attributes:
        flops: peak operations a second of a device on 16 bits: data sheet.
        efficiency: share of it that large matrix products reach; an assumption.
        memory_bandwidth: bytes a second: data sheet.
        local_bandwidth: bytes a second of a device within its machine, in each direction.
        port_bandwidth: bytes a second of a device to other machines, in each direction.
        latency: seconds of a message.
        devices_per_machine: devices of a machine.
    """

    flops: float
    efficiency: float
    memory_bandwidth: float
    local_bandwidth: float
    port_bandwidth: float
    latency: float = 1e-5
    devices_per_machine: int = 8

    def hardware(self) -> Hardware:
        """Return the machines; each device has a port of its own."""
        rate = self.efficiency * self.flops
        return Hardware(
            "as published",
            flops=rate,
            memory_bandwidth=self.memory_bandwidth,
            link_bandwidth=self.devices_per_machine * self.port_bandwidth,
            link_latency=self.latency,
            ranks_per_machine=self.devices_per_machine,
            local_bandwidth=self.local_bandwidth,
            local_latency=self.latency,
        )


@dataclass(frozen=True)
class Training:
    """A published training: data times pipeline times tensor parallelism.

    Attributes:
        model: the decoder.
        cluster: the machines.
        devices: of all workers.
        batch: samples of a training step.
        microbatch: samples of a micro-batch.
        tensor: devices that share a stage.
        pipeline: stages' ranks of a worker.
        chunks: stages of a rank.
        empty_ends: whether the first stage has the embedding alone, and the last one the scores.
        recomputes: whether a backward runs its forward again.
        shares_tokens: whether devices share tokens between blocks, too (sequence parallelism).
        gradient_bytes: of a gradient that workers sum.
        shares_states: whether workers share optimizer states, and gather weights (ZeRO).
    """

    model: Decoder
    cluster: Cluster
    devices: int
    batch: int
    microbatch: int
    tensor: int
    pipeline: int
    chunks: int = 1
    empty_ends: bool = False
    recomputes: bool = False
    shares_tokens: bool = False
    gradient_bytes: int = 2
    shares_states: bool = False

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Training":
        """Return the training of a file's values; raise TypeError if they are incomplete."""
        fields = dict(values)
        model = Decoder(**fields.pop("model"))
        return cls(model=model, cluster=Cluster(**fields.pop("cluster")), **fields)

    @property
    def workers(self) -> int:
        """Workers, each a pipeline."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def in_words(self) -> str:
        """The sizes, for a table."""
        return f"{self.devices} devices, TP {self.tensor}, PP {self.pipeline}, DP {self.workers}"

    def schedule(self, method_name: str) -> Schedule:
        """Build a worker's pipeline."""
        sizes: dict[str, Any] = {"stages": self.pipeline * self.chunks}
        sizes["microbatches"] = self.batch // self.workers // self.microbatch
        if self.chunks > 1:
            sizes["n_ranks"] = self.pipeline
        return ScheduleSpec(method_name, **sizes).build()

    def costs(self) -> tuple[StageCost, ...]:
        """Return the costs of stages on one device."""
        n_stages = self.pipeline * self.chunks
        n_stages_with_layers = n_stages - 2 if self.empty_ends else n_stages
        layers_per_stage = self.model.layers // n_stages_with_layers
        costs = []
        for stage in range(n_stages):
            is_last = stage == n_stages - 1
            is_end = stage == 0 or is_last
            n_layers = 0 if self.empty_ends and is_end else layers_per_stage
            costs.append(self._stage_cost(n_layers, has_scores=is_last))
        return tuple(costs)

    def _stage_cost(self, n_layers: int, *, has_scores: bool) -> StageCost:
        model = self.model
        n_tokens = self.microbatch * model.sequence
        kernels = n_layers * model.kernels(
            self.microbatch, self.tensor, self.shares_tokens
        )
        n_weights = n_layers * model.layer_weights // self.tensor
        scores: tuple[Work, ...] = ()
        if has_scores:
            scores = (
                _product(n_tokens, model.hidden, model.vocabulary // self.tensor),
            )
            n_weights += model.hidden * model.vocabulary // self.tensor
        # A gradient of inputs and one of weights for each product.
        backward_kernels = [_twice(kernel) for kernel in (*kernels, *scores)]
        if self.recomputes:
            backward_kernels += kernels
        # An all-reduce after attention and one after the perceptron. A gather before and a scatter
        # after, of shared tokens, take as long.
        tokens_bytes = float(n_tokens * model.hidden * _HALF)
        exchange_seconds = 0.0
        if n_layers:
            width = Width(self.tensor, self.cluster.hardware())
            exchange_seconds = (
                2 * n_layers * width.seconds(Exchange("all_reduce", tokens_bytes))
            )
        return StageCost(
            flops=sum(kernel.flops for kernel in (*kernels, *scores)),
            backward_flops=sum(kernel.flops for kernel in backward_kernels),
            # Each device sends its share of the tokens.
            input_bytes=tokens_bytes / self.tensor,
            output_bytes=tokens_bytes / self.tensor,
            parameter_bytes=n_weights * _HALF,
            kernels=(*kernels, *scores),
            backward_kernels=tuple(backward_kernels),
            exchange_seconds=exchange_seconds,
            backward_exchange_seconds=(2 if self.recomputes else 1) * exchange_seconds,
        )

    def step_seconds(self, schedule: Schedule) -> float:
        """Return the seconds of a training step: the pipeline, then the sum over workers."""
        costs = self.costs()
        hardware = Width(self.tensor, self.cluster.hardware()).hardware_of_ranks
        share = self.workers if self.shares_states else 1
        state_bytes = [
            cost.parameter_bytes / _HALF * _ADAM_BYTES / share for cost in costs
        ]
        timeline = simulate(schedule.lower(1).verify(), costs, hardware, state_bytes)
        pipeline_seconds = max(span.end for span in timeline.spans)
        n_weights = sum(cost.parameter_bytes for cost in costs) / _HALF / self.pipeline
        # A ring: gradients are summed and scattered, then gradients or weights are gathered.
        moved_bytes = n_weights * (self.gradient_bytes + _HALF)
        if not self.shares_states:
            moved_bytes = n_weights * 2 * self.gradient_bytes
        ring_share = (self.workers - 1) / self.workers
        return pipeline_seconds + ring_share * moved_bytes / self.cluster.port_bandwidth

    def counted_flops(self) -> float:
        """Return the operations of a step as papers count them.

        A backward counts as two forwards, and a forward that runs again as another one. All scores
        of attention count.
        """
        model = self.model
        n_tokens = self.batch * model.sequence
        n_forwards = 4 if self.recomputes else 3
        layer_flops = n_forwards * model.layers * model.token_flops
        # The scores of the vocabulary do not run again.
        return float(n_tokens * (layer_flops + 3 * 2 * model.hidden * model.vocabulary))

    def rate(self, schedule: Schedule) -> float:
        """Return the operations that a device does in a second, in TFLOP/s."""
        return self.counted_flops() / self.step_seconds(schedule) / self.devices / 1e12


def _twice(kernel: Work) -> Work:
    return Work(2 * kernel.flops, 2 * kernel.bytes, kernel.in_16_bits)
